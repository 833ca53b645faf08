"""`Costs`: seconds of computations, and bytes of memory and messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from typing import Self

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Schedule, Skip
from pipeloom.ir.versions import weight_version_bytes

MOST_UNITS = 10_000  # of a stage
MOST = 1e100  # of a time, size or factor: what is added and multiplied up of them stays finite
SIZES = (
    "activation_bytes",
    "weight_gradient_bytes",
    "parameter_bytes",
    "gradient_bytes",
    "message_bytes",
    "gradient_message_bytes",
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The time of every computation on one micro-batch.

    A number is the time of **the full share of one rank**: a stage takes `Schedule.stage_share` of it (1/V with V
    virtual stages per rank). A tuple has one time per stage. A slice takes 1/K of either, times its factor.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W.
        backward: seconds of a whole backward B; ``backward_input + backward_weight`` if not given.
        overlap: seconds of an overlapped unit of F and B (`Schedule.overlapped`) as a fraction of the sum of the two.
        other: seconds of other ops (REDUCE_GRAD, STEP, ...), one number for all stages or one per stage; default 0.
            Background actions (`pipeloom.sim.background`) take them in addition to the time for their bytes.
        units: for each stage, the number of equal units in which its parameters are gathered and its gradients
            reduced. By default a stage is one unit: it computes once all parameters are gathered, and its gradients
            are reduced after its backward.
        activation_bytes: for each stage, bytes that F of one micro-batch keeps for its backward.
        weight_gradient_bytes: for each stage, the part of `activation_bytes` left between I and W; default: all.
        parameter_bytes: for each stage, bytes of one version of its trainable parameters.
        gradient_bytes: for each stage, bytes of their gradients; default: `parameter_bytes`.
        message_bytes: for each stage, bytes per micro-batch sent to the next stage.
        gradient_message_bytes: for each stage, bytes of the gradients sent back to it; default: `message_bytes`.
        skip_bytes: by pair of stages, bytes per micro-batch of the values that skip stages between them (see
            `pipeloom.ir.skips`), and of their gradients.
        rank_slowness: for each rank, the slowdown factor of its computations; default 1.
        slice_factors: for each slice, its seconds relative to an equal share: of F, and of B, I and W; default 1.
        action_seconds: seconds of single computations, such as those of a micro-batch with more tokens. They are taken
            as they are, without factors; other computations take those of their stage.

    Raises:
        InputError: a time, size or factor is negative or not finite, or more bytes are left after I than before.
    """

    forward: float | tuple[float, ...]
    backward_input: float | tuple[float, ...]
    backward_weight: float | tuple[float, ...]
    backward: float | tuple[float, ...] | None = None
    overlap: float = 1.0
    other: Mapping[Op, float | tuple[float, ...]] = field(default_factory=dict)
    units: tuple[int, ...] | None = None
    activation_bytes: tuple[float, ...] | None = None
    weight_gradient_bytes: tuple[float, ...] | None = None
    parameter_bytes: tuple[float, ...] | None = None
    gradient_bytes: tuple[float, ...] | None = None
    message_bytes: tuple[float, ...] | None = None
    gradient_message_bytes: tuple[float, ...] | None = None
    skip_bytes: Mapping[tuple[int, int], float] | None = None
    rank_slowness: tuple[float, ...] | None = None
    slice_factors: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    action_seconds: Mapping[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        times = {what: getattr(self, what) for what in ("forward", "backward_input", "backward_weight", "backward")}
        for what, value in (*times.items(), *self.other.items()):
            for seconds in value if isinstance(value, tuple) else (value or 0.0,):
                check_seconds(what, seconds)
        if not 0 <= self.overlap <= MOST:
            raise InputError(f"overlap={self.overlap}: must be a fraction of the sum of F and B, >= 0.")
        for stage, count in enumerate(self.units or ()):
            if not 1 <= count <= MOST_UNITS:
                raise InputError(
                    f"units[{stage}]={count:g}: a stage must be sent over the links in 1 to {MOST_UNITS} units."
                )
        for factor in chain(*self.slice_factors or ()):
            check_seconds("slice factor", factor)
        for action, seconds in self.action_seconds.items():
            check_seconds(f"seconds of {action}", seconds)
        for rank, factor in enumerate(self.rank_slowness or ()):
            if not 0 < factor <= MOST:
                raise InputError(f"rank_slowness[{rank}]={factor}: slowdown factor must be > 0 and <= {MOST:g}.")
        stages = [(what, getattr(self, what)) for what in (*times, *SIZES, "units")]
        counts = {what: len(value) for what, value in stages if isinstance(value, tuple)}
        if len(set(counts.values())) > 1:
            of = ", ".join(f"{what} has {count} entries" for what, count in counts.items())
            raise InputError(f"costs are of different stages ({of}): each must have one entry per stage.")
        for what in SIZES:
            for stage, size in enumerate(getattr(self, what) or ()):
                if not 0 <= size <= MOST:
                    raise InputError(f"{what}[{stage}]={size}: must be a number of bytes from 0 to {MOST:g}.")
        for pair, size in (self.skip_bytes or {}).items():
            if not 0 <= size <= MOST:
                raise InputError(f"skip_bytes[{pair}]={size}: must be a number of bytes from 0 to {MOST:g}.")
        needs = {"gradient_message_bytes": "message_bytes", "weight_gradient_bytes": "activation_bytes"}
        for part, needed in needs.items():
            if getattr(self, part) is not None and getattr(self, needed) is None:
                raise InputError(f"{part} without {needed}: must have both. Add {needed} per stage.")
        for stage, left in enumerate(self.weight_gradient_bytes or ()):
            whole = (self.activation_bytes or ())[stage]
            if left > whole:
                raise InputError(
                    f"stage {stage} keeps {left:g} weight_gradient_bytes of {whole:g} activation_bytes: the bytes left "
                    "after I cannot exceed all activation bytes."
                )

    @classmethod
    def uniform(
        cls,
        *,
        forward: float = 1.0,
        backward: float | None = None,
        backward_input: float | None = None,
        backward_weight: float | None = None,
        other: Mapping[Op, float | tuple[float, ...]] | None = None,
    ) -> Self:
        """Equal costs for every rank's share. `backward` (default 2.0) splits into equal halves."""
        if backward is not None and (backward_input is not None or backward_weight is not None):
            raise InputError("costs have both backward and its parts, whose sum it is. Pass one or the other.")
        half = (2.0 if backward is None else backward) / 2
        return cls(
            forward=forward,
            backward_input=half if backward_input is None else backward_input,
            backward_weight=half if backward_weight is None else backward_weight,
            other=other or {},
        )

    @classmethod
    def per_stage(
        cls,
        *,
        forward: Sequence[float],
        backward: Sequence[float] | None = None,
        backward_input: Sequence[float] | None = None,
        backward_weight: Sequence[float] | None = None,
        other: Mapping[Op, float | tuple[float, ...]] | None = None,
    ) -> Self:
        """One time for each stage. `backward` splits into equal halves unless both parts are given instead."""
        if (backward is None) == (backward_input is None) or (backward_input is None) != (backward_weight is None):
            raise InputError("costs per stage need either backward, or both backward_input and backward_weight.")
        halves = [seconds / 2 for seconds in backward or ()]
        return cls(
            forward=tuple(forward),
            backward_input=tuple(halves if backward_input is None else backward_input),
            backward_weight=tuple(halves if backward_weight is None else backward_weight),
            other=other or {},
        )

    def others(self, op: Op, schedule: Schedule) -> tuple[float, ...]:
        """For each stage, the seconds of one `op` of `other`. Raises InputError for a wrong number of stages."""
        value = self.other.get(op, 0.0)
        _check_stages(op.value, value, schedule)
        return value if isinstance(value, tuple) else (value,) * schedule.num_stages

    def bytes_kept(self, schedule: Schedule) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """For each stage, bytes of one action from F on and from I on; None if unknown. Raises as `others`."""
        if self.activation_bytes is None:
            return None
        kept = _by_stage("activation_bytes", self.activation_bytes, schedule)
        left = self.weight_gradient_bytes
        return kept, kept if left is None else _by_stage("weight_gradient_bytes", left, schedule)

    def version_bytes(self, schedule: Schedule) -> tuple[float, ...] | None:
        """For each rank, peak bytes of parameters in all versions; None if unknown. Raises InputError as `others`."""
        _check_stages("parameter_bytes", self.parameter_bytes, schedule)
        return None if self.parameter_bytes is None else weight_version_bytes(schedule, self.parameter_bytes)

    def unit_counts(self, schedule: Schedule) -> tuple[int, ...] | None:
        """`units`, validated. Raises InputError for a wrong number of stages."""
        _check_stages("units", self.units, schedule)
        return self.units

    def state_bytes(self, schedule: Schedule) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        """For each stage, bytes of parameters and gradients; None if unknown. Raises InputError as `others`."""
        _check_stages("parameter_bytes", self.parameter_bytes, schedule)
        _check_stages("gradient_bytes", self.gradient_bytes, schedule)
        return self.parameter_bytes, self.parameter_bytes if self.gradient_bytes is None else self.gradient_bytes

    def bytes_sent(self, schedule: Schedule) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each stage, bytes per message to the next stage, and of the gradient that it returns.

        Raises:
            InputError: `message_bytes` is missing, or sizes are for a wrong number of stages.
        """
        if self.message_bytes is None:
            raise no_bytes("links have", "message_bytes")
        there = _by_stage("message_bytes", self.message_bytes, schedule)
        back = self.gradient_message_bytes
        return there, there if back is None else _by_stage("gradient_message_bytes", back, schedule)

    def bytes_of_skips(self, skips: Sequence[Skip]) -> dict[tuple[int, int], float]:
        """Bytes per message of each skip. Raises InputError where one is missing in `skip_bytes`."""
        known, pairs = self.skip_bytes or {}, [skip[:2] for skip in skips]
        for pair in pairs:
            if pair not in known:
                raise InputError(
                    f"links have a bandwidth, but skip_bytes has no entry for stages {pair}, between which values skip "
                    "stages. Add their bytes."
                )
        return {pair: known[pair] for pair in pairs}

    def slowness(self, schedule: Schedule) -> tuple[float, ...] | None:
        """`rank_slowness`, validated. Raises InputError for a wrong number of ranks."""
        factors = self.rank_slowness
        if factors is not None and len(factors) != schedule.num_ranks:
            raise InputError(
                f"rank_slowness has {len(factors)} entries: schedule {schedule.name!r} has {schedule.num_ranks} ranks. "
                "Pass one factor per rank."
            )
        return factors

    def factors(self, schedule: Schedule) -> dict[Op, tuple[float, ...]]:
        """`slice_factors` by op; empty if all are 1. Raises InputError for a wrong number of slices."""
        if self.slice_factors is None:
            return {}
        if any(len(each) != schedule.num_slices for each in self.slice_factors):
            raise InputError(
                f"slice_factors are for {len(self.slice_factors[0])} and {len(self.slice_factors[1])} slices: schedule "
                f"{schedule.name!r} has {schedule.num_slices}. Pass one factor per slice."
            )
        forward, backward = self.slice_factors
        return {Op.F: forward, Op.B: backward, Op.I: backward, Op.W: backward}

    def seconds(self, schedule: Schedule) -> dict[Op, tuple[float, ...]]:
        """For each op, the seconds of one action on each stage. Raises InputError for a wrong number of stages."""
        forward, backward_input, backward_weight = (
            _by_stage(what, getattr(self, what), schedule) for what in ("forward", "backward_input", "backward_weight")
        )
        table = {op: self.others(op, schedule) for op in Op}
        table[Op.F], table[Op.I], table[Op.W] = forward, backward_input, backward_weight
        table[Op.B] = tuple(map(add, backward_input, backward_weight))
        if self.backward is not None:
            table[Op.B] = _by_stage("backward", self.backward, schedule)
        return table


def no_bytes(links: str, what: str) -> InputError:
    """The error of costs without the bytes that links with a bandwidth need."""
    return InputError(f"{links} a bandwidth, but the costs have no {what}. Add {what} per stage.")


def check_seconds(what: str, seconds: float) -> None:
    """Raises InputError unless `seconds` is a duration."""
    if not 0 <= seconds <= MOST:
        raise InputError(f"{what}={seconds}: must be a number of seconds from 0 to {MOST:g}.")


def _by_stage(what: str, value: float | tuple[float, ...], schedule: Schedule) -> tuple[float, ...]:
    """The seconds of one slice of one micro-batch on each stage."""
    _check_stages(what, value, schedule)
    if not isinstance(value, tuple):
        return (value * schedule.stage_share / schedule.num_slices,) * schedule.num_stages
    return tuple(seconds / schedule.num_slices for seconds in value)


def _check_stages(what: str, value: float | tuple[float, ...] | None, schedule: Schedule) -> None:
    if isinstance(value, tuple) and len(value) != schedule.num_stages:
        raise InputError(
            f"{what} has {len(value)} entries: schedule {schedule.name!r} has {schedule.num_stages} stages. "
            "Pass one entry per stage."
        )
