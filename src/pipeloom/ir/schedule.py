"""`Schedule`, `Program` and the one dependency relation between their actions.

A `Schedule` has each rank's computations in order. A `Program` is a schedule after the passes: it also has the sends,
receives and gradient reductions. Both are immutable data. Only `dependencies` defines what an action waits for; the
checker, the simulator, the passes and the pictures all call it.

    stage 0   0F0 0F1 ........ 0B0 0B1          F(s, b) needs F(s-1, b)
                \\   \\          /   /            B(s, b) needs F(s, b) and B(s+1, b)
    stage 1      1F0 1B0 1F1 1B1                W(s, b) needs I(s, b)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, wraps
from math import lcm
from typing import ClassVar, TypeVar, cast

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.action import COMPUTE_OPS, SKIP_RECEIVES, SKIP_SENDS, Action, Op
from pipeloom.ir.check.input_types import as_orders, as_pairs, check_groups, check_skips, of_type, whole_number
from pipeloom.ir.data_axis import DataAxis
from pipeloom.ir.order import LARGE, Order
from pipeloom.ir.placement import Placement
from pipeloom.ir.skips import Skip, skip_receives

T = TypeVar("T")

# Looking up a member of an enumeration takes as long as two tuples.
F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741
SEND_F, RECV_F, SEND_B, RECV_B = Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B
_SENT = {SEND_F: (0, F), RECV_F: (-1, SEND_F), RECV_B: (1, SEND_B)}  # what a message waits for: relative stage and op


class WeightPolicy(StrEnum):
    """Which version of the parameters a micro-batch uses."""

    FLUSH = "flush"  # synchronous: one version, updated after the pipeline has drained
    STASH = "stash"  # PipeDream: a backward uses the version of its own forward on that stage
    VERTICAL = "vertical"  # PipeDream: every stage uses the input stage's version when the micro-batch entered
    DOUBLE_BUFFER = "double-buffer"  # PipeDream-2BW: two versions, a delay of one update on every stage


Orders = tuple[Sequence[Action], ...]
Uses = Mapping[tuple[int, int], int]  # (stage, micro-batch) -> version of the stage's parameters


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The compute actions (F, B, I, W) of one step, in each rank's execution order.

    Attributes:
        name: the family, as on the command line ("1f1b").
        num_microbatches: micro-batches per step.
        num_slices: slices of a micro-batch along the sequence; 1 leaves `Action.slice` None.
        placement: which ranks hold which stage.
        weights: which version of the parameters a micro-batch uses.
        microbatches_per_update: of a stream, the consecutive micro-batches of one update (see `pipeloom.ir.versions`);
            None with `WeightPolicy.FLUSH`, which updates after the schedule.
        orders: ``orders[rank]`` is that rank's sequence of actions: a tuple, or an `Order` in a large schedule. Lists
            become tuples.
        overlapped: pairs of an F and the B or I directly after it that run as one unit (DualPipe's F&B). The unit
            starts when both are ready; both results are available at its end.
        forward_only: True for evaluation, without backwards and without activations kept for them.

    Raises ScheduleError for fields of a wrong type. `pipeloom.ir.check` validates that the schedule is legal.
    """

    name: str
    num_microbatches: int
    num_slices: int = 1
    placement: Placement
    weights: WeightPolicy = WeightPolicy.FLUSH
    microbatches_per_update: int | None = None
    orders: Orders
    overlapped: frozenset[tuple[Action, Action]] = frozenset()
    forward_only: bool = False
    lowered: ClassVar[bool] = False

    def __post_init__(self) -> None:
        what = f"schedule {of_type(self.name, str, 'the name of a schedule')!r}"
        for field, kind in (("placement", Placement), ("weights", WeightPolicy), ("forward_only", bool)):
            of_type(getattr(self, field), kind, f"{field} of {what}")
        object.__setattr__(self, "orders", as_orders(self.orders, what))
        object.__setattr__(self, "overlapped", as_pairs(self.overlapped, what))
        for field in ("num_microbatches", "num_slices", "microbatches_per_update"):
            if field != "microbatches_per_update" or self.microbatches_per_update is not None:
                object.__setattr__(self, field, whole_number(getattr(self, field), f"{field} of {what}"))
        if not self.large and any(isinstance(order, Order) for order in self.orders):
            object.__setattr__(self, "orders", tuple(map(tuple, self.orders)))

    @property
    def large(self) -> bool:
        """Whether `pipeloom.ir.large` checks and times the schedule faster."""
        return sum(map(len, self.orders)) >= LARGE

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @cached_property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def stage_share(self) -> float:
        """One stage as a fraction of one rank's share of the model: 1/V with V virtual stages per rank."""
        return min(1.0, self.num_ranks / self.num_stages)

    def update_interval(self, stage: int) -> int:
        """Micro-batches per update of `stage` in a stream: a multiple of its number of replicas."""
        assert self.microbatches_per_update is not None
        return lcm(self.microbatches_per_update, len(self.placement.replicas[stage]))

    @property
    def update_period(self) -> int:
        """Micro-batches of a stream after which every stage has updated. A stream can end at multiples of it."""
        return lcm(*map(self.update_interval, range(self.num_stages)))

    @cached_property
    def split_backwards(self) -> frozenset[tuple[int, int | None, int | None]]:
        """``(stage, microbatch, slice)`` of every backward that is split into I and W."""
        return frozenset((a.stage, a.microbatch, a.slice) for order in self.orders for a in order if a.op is I)

    @cached_property
    def partners(self) -> dict[Action, Action]:
        """The backward of each F that starts an overlapped unit."""
        return dict(self.overlapped)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank after rank."""
        return ((rank, action) for rank, order in enumerate(self.orders) for action in order)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schedule after the passes: all actions of every rank, communication included.

    Attributes:
        schedule: the schedule that the program runs.
        orders: ``orders[rank]`` is that rank's sequence of actions, compute and other.
        gradient_groups: groups of stages that hold the same parameters. A rank's REDUCE_GRAD on its lowest stage of a
            group sums the group's gradients over all ranks that hold one of its stages.
        data: the data axis; every data-parallel replica runs this program.
        skips: the pairs of stages between which values skip stages (see `pipeloom.ir.skips`).

    Raises ScheduleError for fields of a wrong type, and for gradient groups and skips of unknown stages.
    """

    schedule: Schedule
    orders: Orders
    gradient_groups: tuple[tuple[int, ...], ...] = ()
    data: DataAxis | None = None
    skips: tuple[Skip, ...] = ()
    lowered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        what = f"program {of_type(self.schedule, Schedule, 'the schedule of a program').name!r}"
        object.__setattr__(self, "orders", as_orders(self.orders, what))
        if self.data is not None:
            of_type(self.data, DataAxis, f"the data axis of {what}")
        check_groups(self.gradient_groups, self.schedule.num_stages, what)
        check_skips(self.skips, self.schedule.num_stages, what)

    @property
    def name(self) -> str:
        return self.schedule.name

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @property
    def num_ranks(self) -> int:
        return self.schedule.num_ranks

    @property
    def num_microbatches(self) -> int:
        return self.schedule.num_microbatches

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank after rank."""
        return ((rank, action) for rank, order in enumerate(self.orders) for action in order)

    @cached_property
    def data_reductions(self) -> frozenset[Action]:
        """Every REDUCE_GRAD of the data axis."""
        return frozenset(a for _, a in self.actions() if a.op is Op.REDUCE_GRAD and a.microbatch is not None)

    @cached_property
    def skips_into(self) -> dict[int, tuple[Skip, ...]]:
        """By stage, the skips whose values it uses. Empty without skips."""
        return {stage: tuple(k for k in self.skips if k.target == stage) for stage in {k.target for k in self.skips}}

    @cached_property
    def skips_from(self) -> dict[int, tuple[Skip, ...]]:
        """By stage, the skips whose values it hands out. Empty without skips."""
        return {stage: tuple(k for k in self.skips if k.source == stage) for stage in {k.source for k in self.skips}}

    def ranks_of_group(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The ranks that hold a stage of a gradient group, in ascending order."""
        return tuple(sorted({rank for stage in group for rank in self.placement.replicas[stage]}))


def once_per_schedule(derive: Callable[[Schedule], T]) -> Callable[[Schedule], T]:
    """`derive` with its result cached on the `Schedule` object."""
    key = f"{derive.__module__}.{derive.__qualname__}"

    @wraps(derive)
    def derived(schedule: Schedule) -> T:
        kept = schedule.__dict__
        if key not in kept:
            kept[key] = derive(schedule)
        return cast("T", kept[key])

    return derived


def schedule_of(pipeline: Schedule | Program) -> Schedule:
    """The schedule itself, or the schedule of a program. Raises ScheduleError for other types."""
    if isinstance(pipeline, Program):
        return pipeline.schedule
    if not isinstance(pipeline, Schedule):
        raise ScheduleError(
            f"{folded(pipeline)}: must be a Schedule or a Program. Make one with pipeloom.schedules.build."
        )
    return pipeline


def dependencies(action: Action, pipeline: Schedule | Program) -> tuple[Action, ...]:
    """The actions that must end before `action` starts, in addition to the previous action of its own rank.

    In a `Schedule` a computation waits for the neighbouring stage's computation. In a `Program`, if that stage is on
    another rank, the computation waits for its receive, and the receive for the send. REDUCE_GRAD waits for the
    backwards of its stage because they come earlier on its rank; `walk` makes the ranks of its group wait for each
    other.
    """
    stage, op, microbatch, piece = action
    if op in _SENT:
        offset, sent = _SENT[op]
        return (Action(stage + offset, sent, microbatch, piece),)
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    if op is SEND_B or op is W:
        return (_backward(schedule, stage, microbatch, piece),)
    if op not in COMPUTE_OPS or microbatch is None:
        return _of_other(action, pipeline)
    needs: list[Action] = []
    if op is F:
        if stage > 0:
            remote = pipeline.lowered and _is_remote(schedule, stage - 1, stage, microbatch)
            needs.append(Action(stage if remote else stage - 1, RECV_F if remote else F, microbatch, piece))
        if piece is not None and piece > 0:
            needs.append(Action(stage, F, microbatch, piece - 1))
        if isinstance(pipeline, Program) and stage in pipeline.skips_into:
            needs += skip_receives(action, pipeline.skips, schedule.placement)
        return tuple(needs)
    needs.append(Action(stage, F, microbatch, piece))
    if stage < schedule.num_stages - 1:
        if pipeline.lowered and _is_remote(schedule, stage + 1, stage, microbatch):
            needs.append(Action(stage, RECV_B, microbatch, piece))
        else:
            needs.append(_backward(schedule, stage + 1, microbatch, piece))
    if piece is not None and piece < schedule.num_slices - 1:
        needs.append(_backward(schedule, stage, microbatch, piece + 1))
    if isinstance(pipeline, Program) and stage in pipeline.skips_from:
        needs += skip_receives(action, pipeline.skips, schedule.placement)
    return tuple(needs)


def _of_other(action: Action, pipeline: Schedule | Program) -> tuple[Action, ...]:
    """`dependencies` of what is neither computation nor message between neighbours."""
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    stage, op, microbatch, _ = action
    if op in SKIP_RECEIVES:
        return (action.other_end(),)
    if op in SKIP_SENDS:
        return (Action(stage, F, microbatch) if op is Op.SEND_SKIP else _backward(schedule, stage, microbatch, None),)
    if op is Op.STEP and microbatch is not None and isinstance(pipeline, Program):
        num_replicas = len(schedule.placement.replicas[stage])
        if num_replicas == 1:
            return ()
        end = (microbatch + 1) * schedule.update_interval(stage)  # every replica reduces after its last micro-batch
        return tuple(Action(stage, Op.REDUCE_GRAD, b) for b in range(end - num_replicas, end))
    return ()


def peer_of(action: Action, placement: Placement) -> int:
    """The rank at the other end of a SEND or RECV action."""
    assert action.microbatch is not None
    return placement.rank_of(action.other_stage, action.microbatch)


def message_after(action: Action, schedule: Schedule) -> Action | None:
    """The SEND of a computation's result; None if no other rank needs it."""
    stage, op, microbatch, piece = action
    if op is F and stage < schedule.num_stages - 1:
        other, sent = stage + 1, SEND_F
    elif (op is B or op is I) and stage > 0:
        other, sent = stage - 1, SEND_B
    else:
        return None
    assert microbatch is not None
    return Action(stage, sent, microbatch, piece) if _is_remote(schedule, stage, other, microbatch) else None


def awaited(action: Action, pipeline: Schedule | Program) -> tuple[Action, ...]:
    """`dependencies` of the action, or of both members of the unit that it starts."""
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    partner = schedule.partners.get(action) if schedule.overlapped else None
    return dependencies(action, pipeline) + (() if partner is None else dependencies(partner, pipeline))


def _backward(schedule: Schedule, stage: int, microbatch: int | None, piece: int | None) -> Action:
    """The action that computes the gradient of a stage's input: I if the backward is split, else B."""
    split = (stage, microbatch, piece) in schedule.split_backwards
    return Action(stage, I if split else B, microbatch, piece)


def _is_remote(schedule: Schedule, producer: int, consumer: int, microbatch: int) -> bool:
    """Whether the two stages run the micro-batch on different ranks."""
    replicas = schedule.placement.replicas
    ranks, others = replicas[producer], replicas[consumer]
    return ranks[microbatch % len(ranks)] != others[microbatch % len(others)]
