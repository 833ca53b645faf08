"""GPipe (Huang et al., arXiv:1811.06965): all forwards, then all backwards.

    rank 0  0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
    rank 1  ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
    rank 2  ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...

Makespan ``(m + p - 1) * (tF + tB)``; every rank holds all ``m`` activations. Backwards ascend, so gradients add up in
the order of plain accumulation.
"""

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import alternating
from pipeloom.schedules.table import family


@family("gpipe", paper="GPipe, arXiv:1811.06965", bubble="(p-1)/(m+p-1)", peak="m")
def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards of the step, then all its backwards."""
    return alternating("gpipe", num_microbatches, [num_microbatches] * num_ranks)
