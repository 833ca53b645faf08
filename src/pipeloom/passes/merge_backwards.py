"""Merge an I and the W directly after it into one B, if no other rank waits for the I.

    rank 0:  0F1 0I0 0W0 0F2   ->   0F1 0B0 0F2        stage 0 has no stage before it
    rank 1:  1F1 1I0 1W0 1F2        unchanged: rank 0 waits for the gradient of 1I0

A B is one autograd call, so it takes slightly less time and memory than I and W. But its input gradient is available
only at its end: if another rank needs it, the gradient would be sent later by the time of W, about a third of a
backward. A pair is therefore merged only if the gradient stays on the rank: on the first stage, or if the previous
stage is on the same rank.
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Schedule


def merge_backwards(schedule: Schedule) -> Schedule:
    """`schedule` with these pairs merged; itself if there are none. Live activations do not change."""
    units = {action for pair in schedule.overlapped for action in pair}
    orders = []
    for rank, order in enumerate(schedule.orders):
        merged: list[Action] = []
        for action in order:
            before = merged[-1] if merged else None
            if (
                before is not None
                and action.op is Op.W
                and before == action.with_op(Op.I)
                and _stays(action, rank, schedule)
                and units.isdisjoint((before, action))
            ):
                merged[-1] = action.with_op(Op.B)
            else:
                merged.append(action)
        orders.append(tuple(merged))
    return schedule if tuple(orders) == schedule.orders else replace(schedule, orders=tuple(orders))


def _stays(action: Action, rank: int, schedule: Schedule) -> bool:
    """Whether no other rank uses the gradient of the stage's input."""
    assert action.microbatch is not None
    return action.stage == 0 or schedule.placement.rank_of(action.stage - 1, action.microbatch) == rank
