"""1F1B: PipeDream-Flush (Narayanan et al., arXiv:2006.09503), Megatron-LM's default, DAPPLE's policy PA.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...

Makespan ``(m + p - 1) * (tF + tB)`` like GPipe, but rank ``d`` holds only ``min(p - d, m)`` activations.
"""

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import alternating
from pipeloom.schedules.table import family


@family("1f1b", paper="PipeDream-Flush, arXiv:2006.09503", bubble="(p-1)/(m+p-1)", peak="min(p-d, m)")
def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """A warm-up of ``p - 1 - d`` forwards on rank ``d``, then forward and backward in turn, then the backwards left."""
    return alternating("1f1b", num_microbatches, [num_ranks - 1 - d for d in range(num_ranks)])
