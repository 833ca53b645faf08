"""1F1B: PipeDream-Flush (Narayanan et al., arXiv:2006.09503), Megatron-LM's default, DAPPLE's policy PA.

    rank 0  0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
    rank 1  ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
    rank 2  ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...

Makespan ``(m + p - 1) * (tF + tB)`` like GPipe, but rank ``d`` holds only ``min(p - d, m)`` activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.ir.action import Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import sized


@sized
def one_f_one_b(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """A warm-up of ``p - 1 - d`` forwards on rank ``d``, then forward and backward in turn, then the backwards left."""
    return alternating("1f1b", num_microbatches, [num_ranks - 1 - d for d in range(num_ranks)])


def alternating(name: str, num_microbatches: int, warmups: Sequence[int]) -> Schedule:
    """1F1B with one stage per rank and a warm-up of at most ``warmups[d]`` forwards on rank d."""
    orders = []
    for d, forwards in enumerate(warmups):
        warmup = min(forwards, num_microbatches)
        lane = Phases()
        lane.repeat(warmup, (d, Op.F))
        lane.repeat(num_microbatches - warmup, (d, Op.F), (d, Op.B))
        lane.repeat(warmup, (d, Op.B))
        orders.append(lane.order())
    return Schedule(
        name=name, num_microbatches=num_microbatches, placement=Placement.loop(len(warmups)), orders=tuple(orders)
    )
