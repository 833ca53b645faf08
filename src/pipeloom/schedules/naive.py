"""Naive model parallelism: one micro-batch in the pipeline at a time.

    rank 0  0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
    rank 1  ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
    rank 2  ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...

All ranks but one idle at any moment: makespan ``m * p * (tF + tB)``, one live activation per rank.
"""

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import alternating
from pipeloom.schedules.table import family


@family("naive", paper="naive model parallelism", bubble="(p-1)/p", peak="1")
def naive(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes all the way down and back up before the next one enters."""
    return alternating("naive", num_microbatches, [0] * num_ranks)
