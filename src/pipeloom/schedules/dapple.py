"""DAPPLE's policy PB (Fan et al., arXiv:2007.01045): 1F1B with twice the warm-up, for slow links.

    rank 0  0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 ... 0B2 ... 0B3 ... 0B4 ... 0B5
    rank 1  ... 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 ... 1B4 ... 1B5 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...

Rank d runs ``min(2*(p-d) - 1, m)`` forwards before its first backward and holds as many activations. With one-way
latency c the makespan is GPipe's ``(m + p - 1) * (tF + tB) + 2*c*(p-1)`` as long as ``2*c <= tF + tB``, where plain
1F1B pays for the latency with every micro-batch.
"""

from __future__ import annotations

from pipeloom.ir.action import Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import sized


@sized
def dapple_pb(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """A deep warm-up, then backward and forward in turn, then the backwards left."""
    orders = []
    for d in range(num_ranks):
        warmup = min(2 * (num_ranks - d) - 1, num_microbatches)
        lane = Phases()
        lane.repeat(warmup, (d, Op.F))
        lane.repeat(num_microbatches - warmup, (d, Op.B), (d, Op.F))
        lane.repeat(warmup, (d, Op.B))
        orders.append(lane.order())
    return Schedule(
        name="dapple-pb", num_microbatches=num_microbatches, placement=Placement.loop(num_ranks), orders=tuple(orders)
    )
