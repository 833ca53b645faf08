"""Seq1F1B (Sun et al., arXiv:2406.03488): 1F1B over the slices of sequences, so that memory stays bounded.

    rank 0  0F0.0 0F0.1 0F1.0 ..... 0B0.1 0F1.1 0B0.0 ..... 0B1.1 0B1.0
    rank 1  ..... 1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0 .....

and with two chunks per rank:

    rank 0  0F0.0 0F0.1 2F0.0 2F0.1 0F1.0 0F1.1 2B0.1 2F1.0 2B0.0 2F1.1 0B0.1 ..... 0B0.0 ..... 2B1.1 2B1.0 0B1.1 0B1.0
    rank 1  ..... 1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 1F1.0 3B0.0 1F1.1 1B0.1 3F1.0 1B0.0 3F1.1 3B1.1 3B1.0 1B1.1 1B1.0 .....

The unit of work is a slice of a micro-batch. Forwards take micro-batches and slices in order; backwards take
micro-batches in order and the slices of each from the last to the first, so the first backward has to wait for k
forwards: the warm-up is k - 1 units longer than 1F1B's. Equal slices: makespan ``(m*k + p - 1) * (tF + tB) / k``, peak
``min(p - d + k - 1, m*k)`` slices. With v chunks per rank, in Megatron-LM's order: makespan
``(m*k*v + p - 1) * (tF + tB) / (k*v)``, peak ``min((v-1)*p + 2*(p-1-d) + k, m*k*v)`` slices of a chunk.
"""

from pipeloom.common.division import divisors
from pipeloom.errors import ScheduleError, either
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.schedules.table import family

_Unit = tuple[int, int | None]  # micro-batch, slice


@family(
    "seq1f1b",
    paper="Seq1F1B, arXiv:2406.03488",
    constraints="k slices per sequence; any p >= 1, m >= 1, k >= 1",
    bubble="(p-1)/(m*k+p-1)",
    peak="min(p-d+k-1, m*k)/k",
    sliced=True,
)
def seq1f1b(*, num_ranks: int, num_microbatches: int, num_slices: int = 1) -> Schedule:
    """A warm-up of ``p - 2 - d + k`` slices on rank ``d``, then forward and backward in turn, then what is left."""
    return _alternating("seq1f1b", num_ranks, num_microbatches, num_slices, 1)


@family(
    "seq1f1b-interleaved",
    paper="Seq1F1B, arXiv:2406.03488",
    constraints="k slices per sequence; v > 1: p % k == 0, m*k % p == 0",
    bubble="(p-1)/(m*k*v+p-1)",
    peak="min((v-1)*p + 2*(p-1-d) + k, m*k*v)/(k*v) if v > 1 else min(p-d+k-1, m*k)/k",
    chunks=None,
    sliced=True,
)
def seq1f1b_interleaved(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2, num_slices: int = 1) -> Schedule:
    """Seq1F1B over the virtual order of (unit, chunk) pairs, in groups of p units.

    Raises:
        ScheduleError: k does not divide p, or p does not divide m*k: slower, or a deadlock.
    """
    p, m, k = num_ranks, num_microbatches, num_slices
    if num_chunks > 1 and (p % k or m * k % p):
        counts = divisors(p)
        fits = [count for count in counts if m * count % p == 0]
        fix = f"Use num_slices={fits[0]}" if fits else f"Use a multiple of {p} micro-batches"
        raise ScheduleError(
            f"num_slices={k}, num_microbatches={m}: seq1f1b-interleaved on {p} ranks needs {either(counts)} "
            f"slices, and micro-batches x slices ({m * k}) must be a multiple of {p}. {fix}, or use seq1f1b."
        )
    return _alternating("seq1f1b-interleaved", p, m, k, num_chunks)


def _alternating(name: str, p: int, m: int, k: int, v: int) -> Schedule:
    pieces = [None] if k == 1 else list(range(k))
    forward: list[_Unit] = [(b, piece) for b in range(m) for piece in pieces]
    backward: list[_Unit] = [(b, piece) for b in range(m) for piece in reversed(pieces)]
    total = len(forward) * v
    # Groups of p units take the chunks one after another; with one chunk that is the plain order.
    table = [
        (unit, chunk)
        for first in range(0, len(forward), p)
        for chunk in range(v)
        for unit in range(first, min(first + p, len(forward)))
    ]
    orders = []
    for d in range(p):
        warmup = min((2 * (p - 1 - d) + (v - 1) * p if v > 1 else p - 1 - d) + k - 1, total)
        order = [Action(chunk * p + d, Op.F, *forward[unit]) for unit, chunk in table[:warmup]]
        for index, (unit, chunk) in enumerate(table):
            if warmup + index < total:
                next_unit, next_chunk = table[warmup + index]
                order.append(Action(next_chunk * p + d, Op.F, *forward[next_unit]))
            order.append(Action((v - 1 - chunk) * p + d, Op.B, *backward[unit]))
        orders.append(tuple(order))
    return Schedule(name=name, num_microbatches=m, num_slices=k, placement=Placement.loop(p, v), orders=tuple(orders))
