"""Passes from a schedule to another schedule.

`merge_backwards` merges an I and the W directly after it into one B, if no other rank waits for the I:

    rank 0:  0F1 0I0 0W0 0F2   ->   0F1 0B0 0F2        stage 0 has no stage before it
    rank 1:  1F1 1I0 1W0 1F2        unchanged: rank 0 waits for the gradient of 1I0

A B is one autograd call, so it takes slightly less time and memory than I and W. But its input gradient is available
only at its end: if another rank needs it, the gradient would be sent later by the time of W, about a third of a
backward. A pair is therefore merged only if the gradient stays on the rank: on the first stage, or if the previous
stage is on the same rank.

`separate_units` runs an overlapped F and B one after the other, as a single thread does:

    unit:      RECV_F RECV_B (F & B) SEND_F SEND_B          separate:  RECV_F F SEND_F RECV_B B SEND_B

A unit needs both messages at its start and has both results at its end. Run one after the other, F can send before B
starts, and B's message can arrive during F. No receive comes earlier than before, so no new deadlock is possible.

`stretch` changes the length of a stream: it drops micro-batches, or repeats its steady state:

    F0 F1 F2 B0 F3 B1 F4 B2 B3 B4                    5 micro-batches, with an update after each
    F0 F1 F2 B0 F3 B1 B2 B3                          4: without the last micro-batch
             └────┘ common ┆ then the cool-down      the longer one has one period more before its cool-down: F4 B2
    F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6        7: two periods more
"""

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Schedule, WeightPolicy


def merge_backwards(schedule: Schedule) -> Schedule:
    """`schedule` with each I and the W directly after it merged into one B, if the gradient stays on the rank.

    The schedule itself if there are no such pairs. Live activations do not change.
    """
    units = {action for pair in schedule.overlapped for action in pair}
    orders = []
    for rank, order in enumerate(schedule.orders):
        merged: list[Action] = []
        for action in order:
            stage, op, microbatch, _ = action
            if (
                op is Op.W
                and merged
                and merged[-1] == action.with_op(Op.I)
                and (stage == 0 or schedule.placement.rank_of(stage - 1, microbatch or 0) == rank)
                and units.isdisjoint((merged[-1], action))
            ):
                merged[-1] = action.with_op(Op.B)
            else:
                merged.append(action)
        orders.append(tuple(merged))
    return schedule if tuple(orders) == schedule.orders else replace(schedule, orders=tuple(orders))


def separate_units(schedule: Schedule) -> Schedule:
    """`schedule` with the same orders and without overlapped units; itself if there are none."""
    return replace(schedule, overlapped=frozenset()) if schedule.overlapped else schedule


def check_has_backwards(schedule: Schedule) -> None:
    """Raises ScheduleError if the schedule has no backwards, so that it cannot train."""
    if schedule.forward_only:
        raise ScheduleError(
            f"schedule {schedule.name!r} has only forwards: training needs all backwards, such as "
            f"{schedule.num_stages - 1}B0. Add them, or use the schedule for evaluation."
        )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` in their order; legal if `schedule` is, because fewer actions add no wait.

    A stream becomes synchronous: without updates there is one version of the parameters.
    """
    orders = tuple(tuple(action for action in order if action.op is Op.F) for order in schedule.orders)
    return replace(
        schedule,
        orders=orders,
        overlapped=frozenset(),
        weights=WeightPolicy.FLUSH,
        microbatches_per_update=None,
        forward_only=True,
    )


def evaluation_schedule(schedule: Schedule, num_microbatches: int | None = None) -> Schedule:
    """The forwards of one step of `schedule`; for a stream, of the micro-batches of its first update.

    Args:
        num_microbatches: only of the first so many; None: of all.
    """
    forwards = forward_only(schedule)
    count = num_microbatches or schedule.microbatches_per_update or schedule.num_microbatches
    if count == forwards.num_microbatches:
        return forwards
    return replace(forwards, orders=tuple(before(order, count) for order in forwards.orders), num_microbatches=count)


def repeat_steps(schedule: Schedule, num_steps: int) -> Schedule:
    """The schedule of `num_steps` consecutive steps: every rank starts its next step at the end of the previous one.

    Step k has the micro-batches from ``k * num_microbatches``. The simulation shows how consecutive steps overlap
    without an optimizer barrier (arXiv:2401.10241, section 4).

    Raises:
        ScheduleError: the number of micro-batches is not a multiple of a stage's replicas, so that a micro-batch would
            run on another replica in the next step.
    """
    count = schedule.num_microbatches
    for stage, ranks in enumerate(schedule.placement.replicas):
        if count % len(ranks):
            raise ScheduleError(
                f"num_microbatches={count}: repeated steps need a multiple of the {len(ranks)} replicas of stage "
                f"{stage}. Use a multiple of {len(ranks)}."
            )

    def shifted(action: Action, step: int) -> Action:
        return action if action.microbatch is None else action._replace(microbatch=action.microbatch + step * count)

    steps = range(num_steps)
    return replace(
        schedule,
        num_microbatches=count * num_steps,
        orders=tuple(tuple(shifted(action, step) for step in steps for action in order) for order in schedule.orders),
        overlapped=frozenset((shifted(f, step), shifted(b, step)) for step in steps for f, b in schedule.overlapped),
    )


def stretch(schedule: Schedule, num_microbatches: int) -> Schedule:
    """The stream of `schedule` with `num_microbatches` micro-batches.

    Raises:
        ScheduleError: the length does not end with an update of every stage, or `schedule` has no steady state to
            repeat for a longer stream.
    """
    if num_microbatches == schedule.num_microbatches:
        return schedule
    period = schedule.update_period
    if num_microbatches < 1 or num_microbatches % period:
        seen = f"num_microbatches={num_microbatches}: a stream must end with an update of every stage."
        raise ScheduleError(f"{seen} Use a multiple of {period}.")
    orders, more = schedule.orders, max(0, num_microbatches - schedule.num_microbatches) // period
    if more:
        orders = tuple(_longer(schedule, rank, period, more) for rank in range(schedule.num_ranks))
    return replace(
        schedule,
        num_microbatches=num_microbatches,
        orders=tuple(before(order, num_microbatches) for order in orders),
        overlapped=frozenset(),
    )


def _longer(schedule: Schedule, rank: int, period: int, times: int) -> Sequence[Action]:
    """The order of a rank with the last period of its steady state repeated `times` more."""
    order, length = tuple(schedule.orders[rank]), schedule.num_microbatches
    head, body, drain = _parts(order, length, period)
    _, earlier, _ = _parts(before(order, length - period), length - period, period)
    if tuple(_shifted(earlier, period)) != body:
        counts, each = [len(ranks) for ranks in schedule.placement.replicas], schedule.microbatches_per_update
        raise ScheduleError(
            f"schedule {schedule.name!r} of {length} micro-batches has no steady state to repeat: rank {rank} does not "
            f"repeat its order after {period} micro-batches. Build it with more micro-batches (for pipedream "
            f"pipeloom.schedules.steady_length({counts}, microbatches_per_update={each}) with its in_flight), or run "
            "the batches that it has."
        )
    result = list(head)
    for repeat in range(times + 1):
        result += _shifted(body, repeat * period)
    return (*result, *_shifted(drain, times * period))


def _parts(order: tuple[Action, ...], length: int, period: int) -> tuple[tuple[Action, ...], ...]:
    """The start of an order, its last period, and its cool-down."""
    shorter = before(order, length - period)
    same = next((k for k, (a, b) in enumerate(zip(order, shorter, strict=False)) if a != b), len(shorter))
    behind = len(order) - (len(shorter) - same)
    return order[:same], order[same:behind], order[behind:]


def before(order: Sequence[Action], length: int) -> tuple[Action, ...]:
    """The actions of the micro-batches below `length`."""
    return tuple(action for action in order if action.microbatch is not None and action.microbatch < length)


def _shifted(actions: Sequence[Action], count: int) -> list[Action]:
    return [Action(stage, op, (b or 0) + count, piece) for stage, op, b, piece in actions]
