"""Change the length of a stream: drop micro-batches, or repeat its steady state.

F0 F1 F2 B0 F3 B1 F4 B2 B3 B4                    5 micro-batches, with an update after each
F0 F1 F2 B0 F3 B1 B2 B3                          4: without the last micro-batch
         └────┘ common ┆ then the cool-down      the longer one has one period more before its cool-down: F4 B2
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 B5 B6        7: two periods more
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule


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
        raise ScheduleError(
            f"num_microbatches={num_microbatches}: a stream must end with an update of every stage. "
            f"Use a multiple of {period}."
        )
    more = max(0, num_microbatches - schedule.num_microbatches) // period
    orders = schedule.orders
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
