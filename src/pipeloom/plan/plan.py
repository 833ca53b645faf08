"""`Plan`: everything that a run needs, as immutable data with a versioned JSON form.

    {"version": 4, "schedule": "1f1b", "pipeline": 4, "microbatches": 8, "data": 2, "cut": [6, 6, 7, 5], ...}

The planning commands write plans (`pipeloom partition`, `slice`, `memory` and `simulate` with ``--out plan.json``).
`pipeloom train --plan plan.json` and ``pipeloom.Pipeline(model, plan)`` run them.

Versions: every new key raises the version, and its default is what older plans did. So a newer pipeloom reads older
plans, and an older pipeloom refuses a newer plan in one line instead of ignoring a degree that it does not know. The
keys of tensor and context parallelism came with version 2, those of expert parallelism with version 3,
the order of mesh axes with version 4.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import parse_file, read_json
from pipeloom.common.quantities import bytes_text, seconds_text
from pipeloom.errors import InputError, folded
from pipeloom.ir import Schedule
from pipeloom.ir.text import from_json, to_json
from pipeloom.parallel.mesh_shape import AXES
from pipeloom.parallel.options import DataParallel, Precision
from pipeloom.plan.plan_rules import check_schedule, check_values
from pipeloom.schedules import build, find, is_file, steady_length

VERSION = 4
_SINCE = {
    2: ("tensor", "tensor_layout", "tensor_depth", "sequence", "context", "context_kind"),
    3: ("expert", "expert_axes", "expert_exchange"),
    4: ("order",),
}
_build = lru_cache(maxsize=2)(build)  # a plan builds its schedule to check itself, and again for its run
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
        cut: layers per stage (blocks, for a model with blocks), what to balance: "layers", "parameters" or "time", or
            the modules of a traced model at which the stages after the first begin.
        replicas: ranks per stage (PipeDream's 1F1B-RR). None: one each.
        in_flight: in-flight micro-batches of a stream: "noam" or "full". None: noam.
        weights: weight versions of `pipedream`: "stash" or "vertical". None: stash.
        slices: number of even slices per sequence, or the lengths of the slices in tokens. None: whole sequences.
        recompute: activation recomputation per stage: "none", "selective" or "full"; one word applies to all stages.
        data_strategy: what data-parallel replicas shard: "ddp", "parameter-server", "zero1", "zero2" or "zero3".
        data_granularity: how often zero3 gathers parameters, and zero2 and zero3 reduce gradients: "step", "chunk" or
            "microbatch".
        data_bucket_bytes: size of gradient and parameter buckets in bytes.
        tensor: tensor-parallel degree: processes that share the layers of a stage.
        tensor_layout: how they share them: "1d", "2d", "2.5d" or "3d". None: 1d.
        tensor_depth: depth of layout "2.5d".
        sequence: Megatron's sequence parallelism, with layout "1d".
        context: context-parallel degree: processes that share the sequences.
        context_kind: how attention communicates: "ring", "ring-plain", "ring-self-attention" or "ulysses". None: ring.
        expert: expert-parallel degree: processes that share the experts of a layer; no more processes.
        expert_axes: whose processes share experts: "data", "context" or "data,context". None: data.
        expert_exchange: how tokens are sent to experts: "counts" or "capacity". None: counts.
        order: mesh axes, outermost first, such as "pp,dp,cp,tp". None: dp,pp,cp,tp.
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
    cut: str | tuple[int, ...] | tuple[str, ...] | None = None
    replicas: tuple[int, ...] | None = None
    in_flight: Literal["noam", "full"] | None = None
    weights: Literal["stash", "vertical"] | None = None
    slices: int | tuple[int, ...] | None = None
    recompute: tuple[str, ...] | None = None
    data_strategy: str | None = None
    data_granularity: str | None = None
    data_bucket_bytes: int | None = None
    tensor: int = 1
    tensor_layout: Literal["1d", "2d", "2.5d", "3d"] | None = None
    tensor_depth: int | None = None
    sequence: bool = False
    context: int = 1
    context_kind: Literal["ring", "ring-plain", "ring-self-attention", "ulysses"] | None = None
    expert: int = 1
    expert_axes: Literal["data", "context", "data,context"] | None = None
    expert_exchange: Literal["counts", "capacity"] | None = None
    order: str | None = None
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
        check_values(self._given())
        schedule = self.make_schedule()
        if self.virtual_stages is None:
            object.__setattr__(self, "virtual_stages", schedule.placement.num_chunks)
        if one_word:
            object.__setattr__(self, "recompute", (self.recompute or ()) * schedule.num_stages)
        check_schedule(self._given(), schedule)
        self.data_parallel  # noqa: B018  # its own checks
        self.number_format  # noqa: B018

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return self.pipeline if self.replicas is None else sum(self.replicas)

    @property
    def num_processes(self) -> int:
        """Processes of all data-parallel replicas."""
        return self.num_ranks * self.data * self.tensor * self.context

    @property
    def expert_mesh_axes(self) -> tuple[str, ...]:
        """`expert_axes` as `pipeloom.Mesh` names them, in its order."""
        names = {"data": "dp", "context": "cp"}
        return tuple(names[name] for name in (self.expert_axes or "data").split(","))

    @property
    def mesh_order(self) -> tuple[str, ...]:
        """`order` as `pipeloom.Mesh` takes it."""
        return AXES if self.order is None else tuple(self.order.split(","))

    @property
    def num_slices(self) -> int:
        """Slices per sequence."""
        return len(self.slices) if isinstance(self.slices, tuple) else self.slices or 1

    @property
    def slice_lengths(self) -> tuple[int, ...] | None:
        """Tokens per slice; None where slices are even or sequences stay whole."""
        return self.slices if isinstance(self.slices, tuple) else None

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

    def make_schedule(self) -> Schedule:
        """The schedule of one step; of a stream, a length that shows its steady state.

        Raises:
            ScheduleError: an unknown name, or sizes that the schedule cannot have.
        """
        if isinstance(self.schedule, Schedule):
            return self.schedule
        if is_file(self.schedule):
            raise InputError(
                f"schedule={self.schedule!r}: a plan holds the orders of a schedule file. Pass the Schedule."
            )
        length, per_update = self.microbatches, None
        if find(self.schedule).stream:
            counts, per_update = self.replicas or (1,) * self.num_ranks, self.microbatches
            length = steady_length(counts, microbatches_per_update=per_update, in_flight=self.in_flight or "noam")
        return _build(
            self.schedule,
            num_ranks=self.num_ranks,
            num_microbatches=length,
            num_chunks=self.virtual_stages,
            num_slices=self.num_slices,
            weights=self.weights,
            replicas=self.replicas,
            microbatches_per_update=per_update,
            in_flight=self.in_flight,
        )

    def to_json(self) -> str:
        """The plan as one JSON object; `from_json` reads it back exactly."""
        values = {"version": VERSION, **self._given()}
        if isinstance(self.schedule, Schedule):
            values["schedule"] = json.loads(to_json(self.schedule))
        indents = {"schedule": 1}
        rows = [f' "{name}": {json.dumps(value, indent=indents.get(name))}' for name, value in values.items()]
        return "{\n" + ",\n".join(rows) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            InputError: no JSON, another version, an unknown key, or a value that `Plan` refuses.
        """
        entry = read_json(text, "the plan", "the output of a planning command (`--out`) or of Plan.save")
        version = entry.value.get("version", VERSION) if isinstance(entry.value, Mapping) else VERSION
        if type(version) is not int or not 1 <= version <= VERSION:
            rule = f"this pipeloom reads versions 1 to {VERSION}. Make the plan again with this pipeloom."
            raise InputError(f"version={folded(version)}: {rule}")
        required = [field.name for field in fields(cls) if field.default is MISSING]
        unknown = [name for since, names in _SINCE.items() if version < since for name in names]
        optional = [each.name for each in fields(cls) if each.default is not MISSING and each.name not in unknown]
        data = {name: value.value for name, value in entry.fields(("version", *required), optional).items()}
        del data["version"]
        if isinstance(data["schedule"], Mapping):
            data["schedule"] = from_json(json.dumps(data["schedule"]))
        return cls(**data)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file, whole or not at all.

        Raises:
            OSError: the file cannot be written.
        """
        write_whole(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan from a file.

        Raises:
            InputError: the file cannot be read, or holds no plan of this version; in one line with the path.
        """
        return parse_file("plan", path, cls.from_json, "plan file")

    def __str__(self) -> str:
        """One line per attribute that is set, then the reasons."""
        given = self._given()
        reasons = given.pop("why")
        width = max(map(len, given))
        rows = [f"{name:<{width}}  {_shown(name, value)}" for name, value in given.items()]
        return "\n".join([*rows, *(f"- {reason}" for reason in reasons)])

    def _given(self) -> dict[str, Any]:
        """The values that do not leave the choice to the run."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if value is not None and value is not False}


def _shown(name: str, value: Any) -> str:
    """A value for people."""
    if isinstance(value, tuple):
        return ", ".join(_shown(name, each) for each in value)
    if name.endswith("_bytes"):
        return bytes_text(value)
    if isinstance(value, float):
        return seconds_text(value)
    return value.name if isinstance(value, Schedule) else str(value)
