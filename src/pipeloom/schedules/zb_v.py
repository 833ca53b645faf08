"""ZB-V (Qi et al., arXiv:2401.10241, section 6): zero bubble with 1F1B's memory, two chunks a rank in a V.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ...
    rank 1  ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

Rank d holds stages d and 2p-1-d, so the last stage is on rank 0 and backwards begin there. With equal times of chunks
and m >= 2p-1 the span has no bubble and every rank peaks at exactly 2p chunks; the makespan has (p-1) chunk times.
For m < 2p-1 the order is that of 2p-1 micro-batches without those that do not exist.
"""

from __future__ import annotations

from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.sizes import sized


@sized
def zb_v(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """The hand-made order of the paper."""
    p, m = num_ranks, num_microbatches
    orders = tuple(
        tuple(action for action in _rank_order(p, max(m, 2 * p - 1), d) if (action.microbatch or 0) < m)
        for d in range(p)
    )
    return Schedule(name="zb-v", num_microbatches=m, placement=Placement.v(p), orders=orders)


def _rank_order(p: int, m: int, d: int) -> list[Action]:
    down, up = d, 2 * p - 1 - d
    order: list[Action] = []
    done = dict.fromkeys(((stage, op) for stage in (down, up) for op in (Op.F, Op.I, Op.W)), 0)

    def put(stage: int, *ops: Op) -> None:
        """The next micro-batch of each op."""
        for op in ops:
            order.append(Action(stage, op, done[stage, op]))
            done[stage, op] += 1

    for _ in range(2 * (p - d) - 1):
        put(down, Op.F)
    for _ in range(d):
        put(up, Op.F)
        put(down, Op.F)
    for _ in range(p - d):
        put(up, Op.F, Op.I, Op.W)
    while done[up, Op.F] < done[down, Op.F] or done[down, Op.F] < m:
        if done[down, Op.F] < m:
            put(down, Op.F)
        put(down, Op.I, Op.W)
        put(up, Op.F, Op.I, Op.W)
    for _ in range(d):
        put(down, Op.I)
        put(up, Op.I)
    for _ in range(p - d):
        put(down, Op.I, Op.W)
    for stage in (up, down):
        while done[stage, Op.W] < m:
            put(stage, Op.W)
    return order
