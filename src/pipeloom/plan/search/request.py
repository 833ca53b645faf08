"""`Request`: what is planned, and what is given. No torch here."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.options import DType, GradientDType
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.links import ORDER

Objective = Literal["time", "memory", "cost"]
MOST_DEVICES, MOST_SAMPLES = 2**20, 2**28  # larger numbers would take minutes
MANY_DEVICES = 64  # more: searches end early


def score(objective: Objective, seconds: float, peak: float, devices: int) -> float:
    """What is minimized, of a step with these seconds and this peak memory."""
    if objective == "time":
        return seconds
    return peak if objective == "memory" else seconds * devices


def _whole(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise ValueError("must be an integer of at least 1")
    return int(word)


def _kept(word: str) -> int | None:
    if word != "none" and not word.isdecimal():
        raise ValueError("must be none, or the number of activations that a rank keeps; 0: as few as possible")
    return None if word == "none" else int(word)


def _flag(word: str) -> bool:
    if word not in ("true", "false"):
        raise ValueError("must be true or false")
    return word == "true"


def _one_of(*known: str) -> Callable[[str], str]:
    def read(word: str) -> str:
        if word not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return word

    return read


def _order(word: str) -> tuple[str, ...]:
    names = tuple(word.split(","))
    if not set(names) <= set(ORDER) or len(set(names)) < len(names):
        raise ValueError(f"must be different axes of {', '.join(ORDER)}, outermost first, such as pp,dp,tp")
    return (*names, *(name for name in ORDER if name not in names))


def _blocks(word: str) -> tuple[int, ...]:
    """Embedding and head may be stages without a block."""
    words = word.split(",")
    ends = {0, len(words) - 1} if len(words) > 1 else set()
    return tuple(0 if each == "0" and at in ends else _whole(each) for at, each in enumerate(words))


def _recompute(word: str) -> tuple[str, ...]:
    return tuple(map(_one_of(*map(str, Recompute)), word.split(",")))


FIXABLE: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("pipeline", "data", "tensor", "context", "expert", "chunks"), _whole),
    **dict.fromkeys(("microbatches", "microbatch_size", "slices"), _whole),
    "sequence": _flag,
    "context_kind": _one_of("ring", "ulysses"),
    "schedule": _one_of(*schedules.SYNCHRONOUS),
    "recompute": _recompute,
    "data_strategy": _one_of(*map(str, DataStrategy)),
    "data_granularity": _one_of(*map(str, Granularity)),
    "offload": _kept,
    "offload_states": _flag,
    "order": _order,
    "blocks": _blocks,
    "precision": _one_of(*get_args(DType)),
    "gradients": _one_of(*get_args(GradientDType)),
}
"""The keys of ``--fix``, and how each value is read."""


def parse_fixed(text: str, option: str = "--fix") -> dict[str, Any]:
    """The values of ``--fix pipeline=8,order=dp,pp,recompute=full``, by key.

    Args:
        text: the values.
        option: what messages call it.

    Raises:
        InputError: an unknown key, a key without a value or twice, or a wrong value.
    """
    pairs: list[list[str]] = []
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if equals:
            pairs.append([key.strip(), value.strip()])
        elif pairs:
            pairs[-1][1] += f",{word.strip()}"
        else:
            raise InputError(f"{option}={text}: {word!r} has no value. Write key=value, such as pipeline=8.")
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key not in FIXABLE:
            raise InputError(f"{option}={text}: key {key!r} is unknown. Use {', '.join(FIXABLE)}.")
        if key in found:
            raise InputError(f"{option}={text}: key {key!r} is duplicated. Remove one.")
        try:
            found[key] = FIXABLE[key](value)
        except ValueError as error:
            raise InputError(f"{option}: {key}={value}: {error}. Change it.") from None
    return found


def check_conditions(fixed: Mapping[str, Any], forbidden: frozenset[str], fix: str, forbid: str) -> None:
    """Raises InputError for a key that is both fixed and forbidden; `fix` and `forbid` are what messages call them."""
    if fixed.get("offload_states") and "offload" in forbidden:
        raise InputError(f"{forbid}: offload is that of states too, and {fix} has offload_states=true. Remove one.")
    if (both := next((key for key in fixed if key in forbidden), None)) is not None:
        raise InputError(f"{forbid}: {both} is in {fix} too. Remove it from one of them.")


def check_offload(fixed: Mapping[str, Any], cluster: Cluster, fix: str, *, can_offload: bool) -> None:
    """Raises InputError where offload is fixed and a cluster has none; `fix` is what the message calls it."""
    usual = {"offload": None, "offload_states": False}
    given = next((key for key, value in usual.items() if key in fixed and fixed[key] is not value), None)
    if given is not None and not can_offload:
        raise InputError(
            f"{fix}: {given}: cluster {cluster.name} has no known bandwidth from devices to a host with memory of its "
            "own. Remove it, or add `host_bytes_per_second` to the device of the cluster file."
        )


def parse_forbidden(text: str, option: str = "--forbid") -> frozenset[str]:
    """The keys of ``--forbid offload,context``. Raises InputError for one that cannot be forbidden."""
    keys = [word.strip() for word in text.split(",")]
    for key in keys:
        if key not in USUAL:
            raise InputError(f"{option}={text}: {key!r} cannot be forbidden. Use {', '.join(USUAL)}.")
    return frozenset(keys)


def parse_precisions(text: str) -> tuple[str, ...]:
    """The number formats of ``--precision fp32,bf16``. Raises InputError for an unknown one, and for one twice."""
    names, known = [word.strip() for word in text.split(",")], get_args(DType)
    for name in names:
        if name not in known:
            raise InputError(f"--precision={text}: {name!r} must be one of {', '.join(known)}.")
        if names.count(name) > 1:
            raise InputError(f"--precision={text}: {name} is duplicated. Remove one.")
    return tuple(names)


class Names(NamedTuple):
    """What messages call the number of devices, the batch size, what is fixed, and a cap of memory; and conditions that
    the user gave.
    """

    devices: str
    batch: str
    fix: str
    cap: str
    given: tuple[str, ...] = ()


def given_names(**conditions: str | None) -> tuple[str, ...]:
    """The names of the conditions that the user gave."""
    return tuple(name for name, value in conditions.items() if value)


COMMAND = Names("--devices", "--batch.size", "--fix", "--memory.cap")  # of `pipeloom plan`
PYTHON = Names("devices", "global_batch_size", "fix", "memory_bytes")  # of `pipeloom.plan`
TRAIN = Names("--processes", "--batch.size", "other options", "--memory.cap", ("other options",))  # of `pipeloom train`


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is planned.

    Attributes:
        devices: of the cluster that are used.
        batch_size: global batch size in samples.
        memory_bytes: of a device; infinite if unknown.
        fixed: values by key, of `FIXABLE`; the search chooses the others.
        forbidden: keys of `USUAL` that keep their usual value: degree 1, no offload, no recomputation. With "offload",
            states stay too, with "offload_activations" they need not.
        optimizer: a name of `pipeloom.plan.memory.OPTIMIZERS`.
        objective: what is minimized: seconds per step, the largest peak, or device-seconds per step.
        top: number of plans.
        ends_alone: whether embedding and head can be stages without a block.
        precisions: number formats that plans may have; empty: the usual one of the cluster.
        names: what messages call what is asked.
    """

    devices: int
    batch_size: int
    memory_bytes: float = math.inf
    fixed: Mapping[str, Any] = field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()
    optimizer: str = "adamw"
    objective: Objective = "time"
    top: int = 3
    ends_alone: bool = True
    precisions: tuple[str, ...] = ()
    names: Names = COMMAND

    @property
    def of_many(self) -> bool:
        """Whether a search of so many devices ends early, and looks at fewer shapes."""
        return self.devices > MANY_DEVICES

    @property
    def asked(self) -> str:
        """Devices and samples, for the beginning of a message."""
        return f"{self.names.devices}={self.devices} {self.names.batch}={self.batch_size}"

    @cached_property
    def kinds(self) -> tuple[Recompute, ...]:
        """Kinds of recomputation that a stage may have."""
        given = self.fixed.get("recompute")
        return tuple(kind for kind in Recompute if (kind in given if given else self.allows("recompute", kind)))

    @property
    def offloads_activations(self) -> bool:
        """Whether ranks may offload as many activations as they need to."""
        offload = self.allows("offload", 0) and self.allows("offload_activations", 0)
        return offload and "offload" not in self.fixed

    def allows(self, key: str, value: Any) -> bool:
        """Whether a plan may have this value."""
        if key in self.fixed:
            return bool(self.fixed[key] == value)
        return key not in self.forbidden or value in USUAL[key]


USUAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("pipeline", "data", "tensor", "context", "expert", "chunks", "slices"), (1,)),
    "sequence": (False,),
    "recompute": (Recompute.NONE,),
    "data_strategy": (DataStrategy.DDP,),
    "offload": (None,),
    "offload_activations": (None,),
    "offload_states": (False,),
}
"""What remains of a key of ``--forbid``."""


@dataclass
class Refusals:
    """Why configurations were not offered, and how many were considered."""

    reasons: Counter[str] = field(default_factory=Counter)
    considered: int = 0
    memory: bool = False  # whether a device had too little for one of them

    def add(self, reason: str, count: int = 1) -> None:
        if count:
            self.reasons[reason] += count
            self.considered += count

    def too_large(self, count: int = 1) -> None:
        """Refuse configurations that need more memory than a device has."""
        self.add("more memory than a device has", count)
        self.memory |= count > 0
