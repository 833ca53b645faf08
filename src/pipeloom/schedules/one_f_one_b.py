"""1F1B: PipeDream-Flush (Narayanan et al., arXiv:2006.09503), Megatron-LM's default, DAPPLE's policy PA.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...

Makespan ``(m + p - 1) * (tF + tB)`` like GPipe, but rank ``d`` holds only ``min(p - d, m)`` activations.

Stages may be on different numbers of ranks, as in a run whose lost ranks are replaced by their data-parallel peers
(ReCycle, SOSP 2024; Oobleck, SOSP 2023): stage s runs micro-batch b on rank ``b mod r_s`` of its r_s.
"""

from collections.abc import Sequence

from pipeloom.ir import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.replicated import noam_in_flight, replica_counts, replicated_orders
from pipeloom.schedules.table import family


@family("1f1b", paper="PipeDream-Flush, arXiv:2006.09503", bubble="(p-1)/(m+p-1)", peak="min(p-d, m)", replicated=True)
def one_f_one_b(*, num_ranks: int, num_microbatches: int, replicas: Sequence[int] | None = None) -> Schedule:
    """A warm-up of ``p - 1 - d`` forwards on rank ``d``, then forward and backward in turn, then the backwards left.

    Args:
        num_ranks: ranks of all stages and replicas.
        num_microbatches: micro-batches per step, over all replicas.
        replicas: ranks of each stage; default 1. The warm-up of a stage is then ``ceil(sum_{u >= s} r_u / r_s) - 1``
            forwards on each of its ranks, that of PipeDream's 1F1B-RR.

    Raises:
        ScheduleError: the replicas do not add up to `num_ranks`.
    """
    counts = replica_counts(num_ranks, replicas)
    return Schedule(
        name="1f1b",
        num_microbatches=num_microbatches,
        placement=Placement.replicated(counts),
        orders=replicated_orders(num_microbatches, counts, [forwards - 1 for forwards in noam_in_flight(counts)]),
    )
