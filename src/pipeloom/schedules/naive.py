"""Naive model parallelism: one micro-batch in the pipeline at a time.

    rank 0  0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
    rank 1  ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
    rank 2  ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...

All ranks but one idle at any moment: makespan ``m * p * (tF + tB)``, one live activation per rank.
"""

from __future__ import annotations

from pipeloom.ir.action import Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import sized


@sized
def naive(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes all the way down and back up before the next one enters."""
    orders = []
    for d in range(num_ranks):
        lane = Phases()
        lane.repeat(num_microbatches, (d, Op.F), (d, Op.B))
        orders.append(lane.order())
    return Schedule(
        name="naive", num_microbatches=num_microbatches, placement=Placement.loop(num_ranks), orders=tuple(orders)
    )
