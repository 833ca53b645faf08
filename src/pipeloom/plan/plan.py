"""`Plan`: everything that a run needs, as immutable data with a versioned JSON form.

    {"version": 1, "schedule": "1f1b", "pipeline": 4, "microbatches": 8, "data": 2, "cut": [6, 6, 7, 5], ...}

The planning commands write plans (`pipeloom partition`, `slice`, `memory` and `simulate` with ``--out plan.json``).
`pipeloom train --plan plan.json` and ``pipeloom.Pipeline(model, plan)`` run them.

Versions: every new key raises the version, and its default is what older plans did. Tensor, context and expert degrees
will be such keys, with default 1. So a newer pipeloom can read older plans, and an older pipeloom refuses a newer plan
in one line instead of ignoring a degree that it does not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import Entry, read_json
from pipeloom.common.quantities import bytes_text, counted, seconds_text
from pipeloom.errors import InputError, folded
from pipeloom.ir import Schedule, check
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.ir.text import from_json, to_json
from pipeloom.parallel.options import DataParallel, Precision
from pipeloom.schedules import build, find, is_file, steady_length

VERSION = 1
CUTS = ("layers", "parameters", "time")
_SEQUENCES = ("cut", "replicas", "slices", "recompute", "predicted_memory_bytes", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train a model on a number of processes. Lists become tuples.

    None leaves the choice to the run, unless an attribute says otherwise.

    Attributes:
        schedule: name of a schedule (`pipeloom schedules`), or a `Schedule` with its orders.
        pipeline: pipeline-parallel degree: ranks per pipeline, or stages where `replicas` are given.
        microbatches: micro-batches per step and data-parallel replica; of a stream, per update.
        data: data-parallel degree.
        virtual_stages: virtual stages (chunks) per rank; None becomes the schedule's own number.
        batch_size: global batch size in samples.
        cut: layers per stage (blocks, for a model with blocks), or what to balance: "layers", "parameters" or "time".
        replicas: ranks per stage (PipeDream's 1F1B-RR). None: one each.
        in_flight: in-flight micro-batches of a stream: "noam" or "full". None: noam.
        weights: weight versions of `pipedream`: "stash" or "vertical". None: stash.
        slices: number of even slices per sequence, or the lengths of the slices in tokens. None: whole sequences.
        recompute: activation recomputation per stage: "none", "selective" or "full"; one word applies to all stages.
        data_strategy: what data-parallel replicas shard: "ddp", "parameter-server", "zero1", "zero2" or "zero3".
        data_granularity: how often zero3 gathers parameters, and zero2 and zero3 reduce gradients: "step", "chunk" or
            "microbatch".
        data_bucket_bytes: size of gradient and parameter buckets in bytes.
        precision: "fp32", "bf16" or "fp16".
        gradients: format of accumulated gradients: "float32" or "same".
        offload: offload target: "cpu" or "disk:PATH". None leaves all four offload options to the run.
        offload_states, offload_parameters: whether optimizer states, and sharded or main parameters, are offloaded.
        offload_activations: activations that stay on each rank, 0 for as few as possible; None: all.
        predicted_step_seconds: predicted seconds per step; of a stream, per micro-batch in the steady state.
        predicted_memory_bytes: predicted peak memory of each rank of one data-parallel replica.
        why: reasons, one sentence each.

    Raises:
        InputError: a value of the wrong type, an unknown name, or values that contradict each other.
    """

    schedule: str | Schedule
    pipeline: int
    microbatches: int
    data: int = 1
    virtual_stages: int | None = None
    batch_size: int | None = None
    cut: str | tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    in_flight: Literal["noam", "full"] | None = None
    weights: Literal["stash", "vertical"] | None = None
    slices: int | tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    data_strategy: str | None = None
    data_granularity: str | None = None
    data_bucket_bytes: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    gradients: Literal["float32", "same"] | None = None
    offload: str | None = None
    offload_states: bool = False
    offload_parameters: bool = False
    offload_activations: int | None = None
    predicted_step_seconds: float | None = None
    predicted_memory_bytes: tuple[float, ...] | None = None
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _SEQUENCES:
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        one_word = isinstance(self.recompute, str)
        if one_word:
            object.__setattr__(self, "recompute", (self.recompute,))
        check_fields(self)
        self._check_numbers()
        schedule = self.make_schedule()
        if self.virtual_stages is None:
            object.__setattr__(self, "virtual_stages", schedule.placement.num_chunks)
        if one_word:
            object.__setattr__(self, "recompute", (self.recompute or ()) * schedule.num_stages)
        self._check_schedule(schedule)
        self._check_stages(schedule)
        self._check_data()
        self._check_offload()

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return self.pipeline if self.replicas is None else sum(self.replicas)

    @property
    def num_processes(self) -> int:
        """Ranks of all data-parallel replicas."""
        return self.num_ranks * self.data

    @property
    def num_slices(self) -> int:
        """Slices per sequence."""
        return len(self.slices) if isinstance(self.slices, tuple) else self.slices or 1

    @property
    def slice_lengths(self) -> tuple[int, ...] | None:
        """Tokens per slice; None where slices are even or sequences stay whole."""
        return self.slices if isinstance(self.slices, tuple) else None

    def make_schedule(self) -> Schedule:
        """The schedule of one step; of a stream, a length that shows its steady state.

        Raises:
            ScheduleError: an unknown name, or sizes that the schedule cannot have.
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        return _build(
            self.schedule,
            self.num_ranks,
            self.microbatches,
            self.virtual_stages,
            self.num_slices,
            self.weights,
            self.replicas,
            self.in_flight,
        )

    def to_json(self) -> str:
        """The plan as one JSON object; `from_json` reads it back exactly."""
        values = {"version": VERSION, **{name: value for name, value in self._values().items() if _is_set(value)}}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = json.loads(to_json(self.schedule))
        rows = [
            f' "{name}": {json.dumps(value, indent=1 if name == "schedule" else None)}'
            for name, value in values.items()
        ]
        return "{\n" + ",\n".join(rows) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`.

        Raises:
            InputError: no JSON, another version, an unknown key, or a value that `Plan` refuses.
        """
        entry = read_json(text, "the plan", "the output of a planning command (`--out`) or of Plan.save")
        version = entry.value.get("version", VERSION) if isinstance(entry.value, Mapping) else VERSION
        if type(version) is not int or version != VERSION:
            raise InputError(
                f"version={folded(version)}: this pipeloom reads version {VERSION}. Make "
                "the plan again with this pipeloom."
            )
        names = {field.name: field.default for field in fields(cls)}
        required = [name for name, default in names.items() if default is MISSING]
        data = entry.fields(("version", *required), [name for name in names if name not in required])
        return cls(**{name: _value(name, data[name]) for name in names if name in data})

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            InputError: the file cannot be read, or holds no plan of this version; in one line with the path.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text file"
            raise InputError(f"plan {path}: {reason}. Name a readable plan file.") from error
        except InputError as error:
            raise InputError(f"plan {path}: {error}") from error

    def __str__(self) -> str:
        """One line per attribute that is set, then the reasons."""
        given = {name: value for name, value in self._values().items() if _is_set(value)}
        reasons = given.pop("why")
        width = max(map(len, given))
        rows = [f"{name:<{width}}  {_shown(name, value)}" for name, value in given.items()]
        return "\n".join([*rows, *(f"- {reason}" for reason in reasons)])

    def _values(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def _check_numbers(self) -> None:
        numbers = ("pipeline", "microbatches", "data", "virtual_stages", "batch_size")
        least = {**dict.fromkeys(numbers, 1), "data_bucket_bytes": 0, "offload_activations": 0}
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InputError(f"{name}={value}: must be at least {smallest}. Raise it.")
        for name in ("replicas", "slices"):
            given = getattr(self, name)
            counts = given if isinstance(given, tuple) else (given,)
            if given is not None and (not counts or min(counts) < 1):
                raise InputError(f"{name}={_plain(given)}: each must be at least 1. Raise it.")
        if self.replicas is not None:
            if not isinstance(self.schedule, Schedule) and "replicas" not in find(self.schedule).stream:
                raise InputError(
                    f"replicas={_plain(self.replicas)}: schedule {self.schedule!r} flushes, so each stage has "
                    "one rank. Remove replicas, or use pipedream."
                )
            if len(self.replicas) != self.pipeline:
                raise InputError(
                    f"replicas={_plain(self.replicas)}: {counted(len(self.replicas), 'stage')}, but pipeline="
                    f"{self.pipeline}. With replicas, `pipeline` is the number of stages. Make both agree."
                )
        if self.batch_size is not None and self.batch_size < self.microbatches * self.data:
            raise InputError(
                f"batch_size={self.batch_size}: {self.microbatches} micro-batches on each of {self.data} data-parallel "
                f"replicas need at least {self.microbatches * self.data} samples. Raise it, or lower microbatches."
            )
        for value in (self.predicted_step_seconds, *(self.predicted_memory_bytes or ())):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InputError(f"prediction {value}: must be a finite number of at least 0. Correct or remove it.")

    def _check_schedule(self, schedule: Schedule) -> None:
        if isinstance(self.schedule, Schedule):
            check(schedule)
            made = {
                "pipeline": schedule.num_ranks,
                "microbatches": schedule.microbatches_per_update or schedule.num_microbatches,
                "virtual_stages": schedule.placement.num_chunks,
            }
            for name, number in made.items():
                if getattr(self, name) != number:
                    raise InputError(
                        f"{name}={getattr(self, name)}: the orders of schedule {schedule.name!r} have {number}. "
                        f"Use {name}={number}."
                    )
            for name in ("replicas", "in_flight", "weights"):
                if getattr(self, name) is not None:
                    raise InputError(
                        f"{name}={_plain(getattr(self, name))}: the orders of schedule {schedule.name!r} already say "
                        "it. Remove it."
                    )
        if self.slices is not None and schedule.num_slices != self.num_slices:
            raise InputError(
                f"slices={_plain(self.slices)}: schedule {schedule.name!r} has {counted(schedule.num_slices, 'slice')}"
                ". Make both agree."
            )
        if schedule.microbatches_per_update is not None:
            for name, value in (("data", self.data), ("precision", self.precision)):
                if value not in (None, 1, "fp32"):
                    raise InputError(
                        f"{name}={value}: stages of schedule {schedule.name!r} update by themselves, on one "
                        "data-parallel replica in fp32. Use replicas, or a schedule that flushes, such as 1f1b."
                    )

    def _check_stages(self, schedule: Schedule) -> None:
        """Compare what is given per stage or per rank with the schedule."""
        stages = schedule.num_stages
        if isinstance(self.cut, str):
            if self.cut not in CUTS:
                raise InputError(f"cut={self.cut!r}: must be {', '.join(CUTS)} or layers per stage. Choose one.")
        elif self.cut is not None:
            if len(self.cut) != stages:
                raise InputError(
                    f"cut={_plain(self.cut)}: {counted(len(self.cut), 'stage')}, but schedule {schedule.name!r} has "
                    f"{stages}. Give the layers of each stage."
                )
            if min(self.cut) < 0 or (stages > 1 and not all(self.cut[1:-1])) or not any(self.cut):
                raise InputError(f"cut={_plain(self.cut)}: a stage needs a layer. Give each stage at least 1.")
        if self.recompute is not None:
            recompute_of_stages(self.recompute, stages)
        memory = self.predicted_memory_bytes
        if memory is not None and len(memory) != schedule.num_ranks:
            raise InputError(
                f"predicted_memory_bytes has {counted(len(memory), 'rank')}, but the pipeline has "
                f"{schedule.num_ranks}. Give one number per rank."
            )

    def _check_data(self) -> None:
        """Raises InputError for unknown names, or a granularity or gradient format that does not fit."""
        self.data_parallel  # noqa: B018
        self.number_format  # noqa: B018
        shards = self.data_strategy or "ddp"
        if self.offload_parameters and shards != "zero3" and (self.precision or "fp32") == "fp32":
            raise InputError(
                f"offload_parameters=True: with {shards} in fp32 every forward reads the parameters. Use zero3, bf16 "
                "or fp16, or remove it."
            )

    @property
    def data_parallel(self) -> DataParallel:
        """`data_strategy`, `data_granularity` and `data_bucket_bytes` as a pipeline takes them."""
        given = {"strategy": self.data_strategy, "bucket_bytes": self.data_bucket_bytes}
        return DataParallel(
            granularity=self.data_granularity,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )

    @property
    def number_format(self) -> Precision:
        """`precision` and `gradients` as a pipeline takes them."""
        return Precision(self.precision or "fp32", self.gradients or "float32")

    def _check_offload(self) -> None:
        names = ("offload_states", "offload_parameters", "offload_activations")
        given = [name for name in names if _is_set(getattr(self, name))]
        if self.offload is None:
            if given:
                raise InputError(f"{given[0]}={getattr(self, given[0])}: no offload target. Add offload='cpu'.")
            return
        if self.offload != "cpu" and not (self.offload.startswith("disk:") and len(self.offload) > len("disk:")):
            raise InputError(f"offload={self.offload!r}: must be cpu or disk:PATH. Use one of them.")
        if not given:
            raise InputError(f"offload={self.offload!r}: nothing is offloaded. Remove it, or set offload_states=True.")


@lru_cache(maxsize=2)
def _build(
    name: str,
    num_ranks: int,
    microbatches: int,
    virtual_stages: int | None,
    num_slices: int,
    weights: str | None,
    replicas: tuple[int, ...] | None,
    in_flight: str | None,
) -> Schedule:
    if is_file(name):
        raise InputError(f"schedule={name!r}: a plan holds the orders of a schedule file. Pass the Schedule.")
    stream = bool(find(name).stream)
    if stream:
        counts = (1,) * num_ranks if replicas is None else replicas
        length = steady_length(counts, microbatches_per_update=microbatches, in_flight=in_flight or "noam")
    return build(
        name,
        num_ranks=num_ranks,
        num_microbatches=length if stream else microbatches,
        num_chunks=virtual_stages,
        num_slices=num_slices,
        weights=weights,
        replicas=replicas,
        microbatches_per_update=microbatches if stream else None,
        in_flight=in_flight,
    )


def _value(name: str, entry: Entry) -> Any:
    """A value of the JSON as the field `name` has it."""
    if name == "schedule" and isinstance(entry.value, Mapping):
        return from_json(json.dumps(entry.value))
    return entry.value


def _is_set(value: object) -> bool:
    return value is not None and value is not False


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _shown(name: str, value: Any) -> str:
    """A value for people."""
    if isinstance(value, tuple):
        return ", ".join(_shown(name, each) for each in value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, float):
        return seconds_text(value)
    return value.name if isinstance(value, Schedule) else str(value)
