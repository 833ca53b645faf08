"""Looped breadth-first (Lamy-Poirier, arXiv:2211.05953): all micro-batches through a chunk before the next chunk.

    rank 0  0F0 0F1 0F2 2F0 2F1 2F2 ... ... 2B0 2B1 2B2 0B0 0B1 0B2
    rank 1  ... 1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2 ...

The makespan of interleaved 1F1B for ``m >= p`` with GPipe's memory (``m`` rank-shares). The benefit: every chunk's
weights are gathered once per pass and its gradients reduced once, overlapped with other chunks' computation (ZeRO-2/3).
"""

from pipeloom.ir import Op, Placement, Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.table import family


@family(
    "bfs",
    paper="breadth-first, arXiv:2211.05953",
    constraints="any p >= 1, m >= 1, v >= 1; bubble formula for m >= p",
    bubble="(p-1)/(m*v+p-1)",
    peak="m",
    chunks=None,
)
def breadth_first(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Chunk after chunk forwards, then chunk after chunk backwards."""
    orders = []
    for d in range(num_ranks):
        lane, stages = Phases(), range(d, num_ranks * num_chunks, num_ranks)
        for stage, op in (*((stage, Op.F) for stage in stages), *((stage, Op.B) for stage in reversed(stages))):
            lane.repeat(num_microbatches, (stage, op))
        orders.append(lane.order())
    placement = Placement.loop(num_ranks, num_chunks)
    return Schedule(name="bfs", num_microbatches=num_microbatches, placement=placement, orders=tuple(orders))
