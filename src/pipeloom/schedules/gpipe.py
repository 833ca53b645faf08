"""GPipe (Huang et al., arXiv:1811.06965): all forwards, then all backwards.

    rank 0  0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
    rank 1  ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
    rank 2  ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...

Makespan ``(m + p - 1) * (tF + tB)``; every rank holds all ``m`` activations. Backwards ascend, so gradients add up in
the order of plain accumulation.
"""

from __future__ import annotations

from pipeloom.ir.action import Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import sized


@sized
def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards of the step, then all its backwards."""
    orders = []
    for d in range(num_ranks):
        lane = Phases()
        lane.repeat(num_microbatches, (d, Op.F))
        lane.repeat(num_microbatches, (d, Op.B))
        orders.append(lane.order())
    return Schedule(
        name="gpipe", num_microbatches=num_microbatches, placement=Placement.loop(num_ranks), orders=tuple(orders)
    )
