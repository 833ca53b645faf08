"""Make one B of an I and the W that follows it at once, where nobody waits for the I.

    rank 0:  0F1 0I0 0W0 0F2   ->   0F1 0B0 0F2        stage 0 has no stage before it that waits
    rank 1:  1F1 1I0 1W0 1F2        stays: rank 0 waits for the gradient that 1I0 yields, and W is not in its way

A B is one run of autograd and holds nothing in between, so it takes a little less time and memory than I and W. But it
has its input gradient only at its end. Where that gradient goes to another rank it would leave later by the time of a
W, some third of a backward, to save some hundredths. So a pair is merged only where the gradient stays: on the first
stage, and where the stage before is on the same rank, whose next action could not start before the W anyway.
"""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Schedule


def merge_backwards(schedule: Schedule) -> Schedule:
    """`schedule` with such pairs of I and W as B; itself if it has none. Live activations stay what they were."""
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
    """Whether the gradient of the stage's input is used on `rank`, or nowhere."""
    assert action.microbatch is not None
    return action.stage == 0 or schedule.placement.rank_of(action.stage - 1, action.microbatch) == rank
