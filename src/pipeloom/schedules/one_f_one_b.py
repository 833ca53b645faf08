"""Naive model parallelism, GPipe and 1F1B: one stage per rank, with other warm-ups.

Naive: one micro-batch in the pipeline at a time.

    rank 0  0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
    rank 1  ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
    rank 2  ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...

All ranks but one idle at any moment: makespan ``m * p * (tF + tB)``, one live activation per rank.

GPipe (Huang et al., arXiv:1811.06965): all forwards, then all backwards.

    rank 0  0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
    rank 1  ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
    rank 2  ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...

Makespan ``(m + p - 1) * (tF + tB)``; every rank holds all ``m`` activations. Backwards ascend, so gradients add up in
the order of plain accumulation.

1F1B: PipeDream-Flush (Narayanan et al., arXiv:2006.09503), Megatron-LM's default, DAPPLE's policy PA.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...

Makespan ``(m + p - 1) * (tF + tB)`` like GPipe, but rank ``d`` holds only ``min(p - d, m)`` activations.
"""

from __future__ import annotations

from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import alternating
from pipeloom.schedules.table import family


@family(
    "naive",
    paper="naive model parallelism",
    bubble="(p-1)/p",
    peak="1",
)
def naive(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes all the way down and back up before the next one enters."""
    return alternating("naive", num_microbatches, [0] * num_ranks)


@family(
    "gpipe",
    paper="GPipe, arXiv:1811.06965",
    bubble="(p-1)/(m+p-1)",
    peak="m",
)
def gpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards of the step, then all its backwards."""
    return alternating("gpipe", num_microbatches, [num_microbatches] * num_ranks)


@family(
    "1f1b",
    paper="PipeDream-Flush, arXiv:2006.09503",
    bubble="(p-1)/(m+p-1)",
    peak="min(p-d, m)",
)
def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """A warm-up of ``p - 1 - d`` forwards on rank ``d``, then forward and backward in turn, then the backwards left."""
    return alternating("1f1b", num_microbatches, [num_ranks - 1 - d for d in range(num_ranks)])
