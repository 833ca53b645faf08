"""Stages on several ranks (PipeDream's 1F1B-RR, arXiv:1806.03377): ranks per stage, and the orders of all ranks.

replicas (2, 1):  rank 0  0F0 0F2 ... 0B0 0F4 0B2 ...     micro-batch b of stage s runs on rank b mod r_s of its r_s
                  rank 1  ... 0F1 0F3 ... 0B1 0F5 ...
                  rank 2  ... 1F0 1B0 1F1 1B1 1F2 1B2
"""

from collections.abc import Sequence
from itertools import accumulate

from pipeloom.errors import ScheduleError
from pipeloom.ir.order import Order
from pipeloom.schedules.phases import Phases


def replica_counts(num_ranks: int, replicas: Sequence[int] | None) -> list[int]:
    """The number of ranks of each stage. Raises ScheduleError if they do not add up to `num_ranks`."""
    counts = [1] * num_ranks if replicas is None else list(replicas)
    if any(not hasattr(r, "__index__") or r < 1 for r in counts) or sum(counts) != num_ranks:
        raise ScheduleError(
            f"replicas={counts}: every stage must have at least 1, and their sum must be num_ranks={num_ranks}."
        )
    return counts


def noam_in_flight(counts: Sequence[int]) -> list[int]:
    """PipeDream's in-flight micro-batches per replica of each stage: ``ceil(sum_{u >= s} r_u / r_s)``."""
    onwards = list(accumulate(reversed(counts)))[::-1]
    return [-(-total // ranks) for total, ranks in zip(onwards, counts, strict=True)]


def replicated_orders(num_microbatches: int, counts: Sequence[int], warmups: Sequence[int]) -> tuple[Order, ...]:
    """1F1B's order of each rank, with ``warmups[s]`` warm-up forwards on each of the ``counts[s]`` ranks of stage s."""
    return tuple(
        Phases(first=replica, stride=ranks).alternate(stage, num_microbatches, forwards).order()
        for stage, (ranks, forwards) in enumerate(zip(counts, warmups, strict=True))
        for replica in range(ranks)
    )
