"""DAPPLE's policy PB (Fan et al., arXiv:2007.01045): 1F1B with twice the warm-up, for slow links.

    rank 0  0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 ... 0B2 ... 0B3 ... 0B4 ... 0B5
    rank 1  ... 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 ... 1B4 ... 1B5 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5 ... ...

Rank d runs ``min(2*(p-d) - 1, m)`` forwards before its first backward and holds as many activations. With one-way
latency c the makespan is GPipe's ``(m + p - 1) * (tF + tB) + 2*c*(p-1)`` as long as ``2*c <= tF + tB``, where plain
1F1B pays for the latency with every micro-batch.
"""

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import alternating
from pipeloom.schedules.table import family


@family("dapple-pb", paper="DAPPLE policy PB, arXiv:2007.01045", bubble="(p-1)/(m+p-1)", peak="min(2*(p-d)-1, m)")
def dapple_pb(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B's order with twice its warm-up."""
    return alternating("dapple-pb", num_microbatches, [2 * (num_ranks - 1 - d) for d in range(num_ranks)])
