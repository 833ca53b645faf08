"""TeraPipe (Li et al., arXiv:2102.07988): GPipe over the slices of a sequence, all forwards, then all backwards.

    rank 0  0F0.0 0F0.1 0F0.2 ..... ..... ..... ..... 0B0.2 0B0.1 0B0.0
    rank 1  ..... 1F0.0 1F0.1 1F0.2 ..... ..... 1B0.2 1B0.1 1B0.0 .....
    rank 2  ..... ..... 2F0.0 2F0.1 2F0.2 2B0.2 2B0.1 2B0.0 ..... .....

Slice i of a causal model needs slices up to i, so forwards ascend; a token's keys and values accumulate gradients from
all later slices, so backwards descend inside a micro-batch. Makespan ``(m*k + p - 1) * (tF + tB) / k`` for equal
slices, ``sum(tf + tb) + (p - 1) * (max tf + max tb)`` for any; every rank holds all slices.
"""

from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.schedules.table import family


@family(
    "terapipe",
    paper="TeraPipe, arXiv:2102.07988",
    constraints="k slices per sequence; any p >= 1, m >= 1, k >= 1",
    bubble="(p-1)/(m*k+p-1)",
    peak="m",
    sliced=True,
)
def terapipe(*, num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """All forwards over (micro-batch, slice), then all backwards; slices descend there, micro-batches ascend."""
    k = num_slices
    ascending = [None] if k == 1 else list(range(k))
    orders = tuple(
        tuple(
            Action(d, op, b, piece)
            for op, pieces in ((Op.F, ascending), (Op.B, ascending[::-1]))
            for b in range(num_microbatches)
            for piece in pieces
        )
        for d in range(num_ranks)
    )
    return Schedule(
        name="terapipe",
        num_microbatches=num_microbatches,
        num_slices=k,
        placement=Placement.loop(num_ranks),
        orders=orders,
    )
