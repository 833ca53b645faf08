"""Compares what processes are about to run, before they exchange anything else.

Every process sends its terms, plain values by name, to the others. `first_difference` names the rank and the term that
differ. `RunFingerprint` holds the terms of a pipeline. A stream compares its own terms (see
`pipeloom.training.stream.stream`).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from hashlib import blake2b
from typing import Any, NamedTuple, Self, TypeVar

from pipeloom.common.quantities import counted
from pipeloom.errors import CheckpointError, InputError, PipeloomError
from pipeloom.ir import Program
from pipeloom.processes.members import Members

T = TypeVar("T")


class Difference(NamedTuple):
    """The term `name` has the value `one` on rank `first` and `other` on rank `rank`; None where it is missing."""

    name: str
    first: int
    one: Any
    rank: int
    other: Any


def first_difference(terms: Iterable[tuple[int, Mapping[str, Any]]]) -> Difference | None:
    """Compare the terms of all ranks with those of the first; None where they are equal."""
    (first, expected), *others = terms
    for rank, found in others:
        for name in {**expected, **found}:
            if expected.get(name) != found.get(name):
                return Difference(name, first, expected.get(name), rank, found.get(name))
    return None


def gather_json(value: Any, members: Members | None, *, lost: str, timeout_seconds: float | None = None) -> list[Any]:
    """All-gather a value as JSON; returns the values of all `members`. None: only this process.

    Raises:
        PeerLost: a process ended or timed out; the message is `lost`.
    """
    payload = json.dumps(value).encode()
    if members is None:
        return [json.loads(payload)]
    return [json.loads(p) for p in members.gather(payload, lost=lost, timeout_seconds=timeout_seconds)]


def together(work: Callable[[], T], gather: Callable[[bytes], list[bytes]], *, failed: str) -> list[T]:
    """Call `work` on every rank and return the results (JSON) of all. If a rank fails, every rank raises its error.

    Args:
        work: of this rank.
        gather: the all-gather of the ranks.
        failed: begins the error.

    Raises:
        CheckpointError: a rank failed; the message has its number and its error.
    """
    failure: Exception | None = None
    try:
        payload = json.dumps({"answer": work()})
    except Exception as error:  # of any type: the other ranks must not wait for this one
        failure = error
        text = str(error) if isinstance(error, PipeloomError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename or 'writing'}: {error.strerror}. Free disk space, or choose another output_dir."
        payload = json.dumps({"error": " ".join(text.split())})
    answers = [json.loads(text) for text in gather(payload.encode())]
    errors = [(rank, answer["error"]) for rank, answer in enumerate(answers) if "error" in answer]
    if errors:
        rank, first = errors[0]
        more = f" (and {counted(len(errors) - 1, 'more rank')})" if len(errors) > 1 else ""
        refusal = CheckpointError(f"{failed}: rank {rank}: {first}{more}")
        refusal.rank = rank
        raise refusal from failure
    return [answer["answer"] for answer in answers]


_ITEMS = {  # field of `RunFingerprint` -> what differs, and the arguments that set it
    "orders": ("the orders of the schedule", "schedule"),
    "stages": ("the layers of the stages", "model, `layers` and `cut`"),
    "slices": ("the lengths of the slices", "`slices`"),
    "tied": ("their tied parameters", "model"),
    "data": ("their data-parallel options", "`mesh`, `data` and `precision`"),
    "formats": ("their buckets, number formats or offload", "`data` and `precision`"),
    "context": ("their context parallelism", "`context`"),
}


class RunFingerprint(NamedTuple):
    """What one process is about to run.

    Attributes:
        schedule: its name and sizes, for errors.
        orders, stages, slices, tied, data, formats, context: hashes of what must be equal on all processes.
    """

    schedule: str
    orders: str
    stages: str
    slices: str
    tied: str
    data: str
    formats: str
    context: str

    @classmethod
    def of(
        cls,
        program: Program,
        layers: Sequence[Sequence[str]],
        slices: Sequence[int] | None,
        others: Sequence[str] = (),
        context: Sequence[str] = (),
    ) -> Self:
        """The fingerprint of a training program on a model of these `layers`, stage by stage, and other terms."""
        schedule = program.schedule
        cut = f", {schedule.num_slices} slices" if schedule.num_slices > 1 else ""
        sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
        orders = [" ".join(map(str, order)) for order in program.orders]
        weights = [schedule.weights, schedule.microbatches_per_update]
        return cls(
            schedule=f"{schedule.name!r} of {sizes}{cut}",
            orders=_digest([orders, schedule.placement.replicas, weights]),
            stages=_digest(layers),
            slices=_digest(slices),
            tied=_digest(program.gradient_groups),
            data=_digest(program.data and astuple(program.data)),
            formats=_digest([*others]),
            context=_digest([*context]),
        )

    def agree(self, members: Members, timeout_seconds: float) -> None:
        """Compare with all `members`, a collective call.

        Raises:
            InputError: two processes differ; raised on all of them.
            PeerLost: a process ended or timed out.
        """
        lost = "another rank ended or timed out before every rank had made its Pipeline; see its error"
        terms = gather_json(self._asdict(), members, lost=lost, timeout_seconds=timeout_seconds)
        found = first_difference(enumerate(terms))
        if found is None:
            return
        if found.name == "schedule":
            raise InputError(
                f"rank 0 has schedule {found.one} and rank {found.rank} {found.other}: all ranks must run the same "
                "schedule. Pass the same one on each."
            )
        item, fix = _ITEMS[found.name]
        raise InputError(
            f"ranks 0 and {found.rank} both have schedule {terms[0]['schedule']}, but differ in {item}: all ranks must "
            f"run the same program. Pass the same {fix} on each."
        )


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()
