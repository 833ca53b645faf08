"""Megatron-LM's interleaved 1F1B (Narayanan et al., arXiv:2104.04473): V chunks per rank, a bubble V times smaller.

    rank 0  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 ... 2B2 ... 2B3 0B2 0B3
    rank 1  ... 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 ...

Micro-batches go through a chunk in groups of N (`group_size`, by default p): N of chunk 0, the same N of chunk 1, and
so on. Makespan ``(m*v + p - 1) * (tF + tB) / v``; peak on rank d ``min((v-1)*N + 2*(p-1-d) + 1, m*v)`` chunks.

With N = p, a latency c of at most min(tF, tB) / v adds ``2 * (p*v - 1) * c`` to the makespan.
"""

from array import array

from pipeloom.common.quantities import counted
from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.order import Order, encode
from pipeloom.schedules.table import family


@family(
    "interleaved",
    paper="Megatron-LM, arXiv:2104.04473",
    constraints="v > 1: m >= p, m % p == 0; with group_size N: p <= N <= m, m % N == 0 or m % N >= p",
    bubble="(p-1)/(m*v+p-1)",
    peak="min((v-1)*p + 2*(p-1-d) + 1, m*v)/v if v > 1 else min(p-d, m)",
    chunks=None,
)
def interleaved(
    *, num_ranks: int, num_microbatches: int, num_chunks: int = 2, group_size: int | None = None
) -> Schedule:
    """1F1B over the virtual order of (micro-batch, chunk) pairs.

    Args:
        num_ranks: p.
        num_microbatches: m.
        num_chunks: v, virtual stages per rank.
        group_size: N, micro-batches that run through one chunk before the next chunk.

    Raises:
        ScheduleError: N outside p..m, or fewer than p micro-batches in the last group: slower, or a deadlock.
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    n = p if group_size is None else group_size
    if v > 1:
        _check_groups(p, m, group_size)
    table = [(b, chunk) for first in range(0, m, n) for chunk in range(v) for b in range(first, min(first + n, m))]
    forwards = array("q", (encode(Action(chunk * p, Op.F, b)) for b, chunk in table))  # of rank 0
    backwards = array("q", (encode(Action((v - 1 - chunk) * p, Op.B, b)) for b, chunk in table))
    orders = []
    for d in range(p):
        warmup = min(2 * (p - 1 - d) + (v - 1) * n, m * v) if v > 1 else min(p - 1 - d, m)
        both = m * v - warmup
        codes = forwards + backwards
        codes[warmup : warmup + 2 * both : 2] = forwards[warmup:]
        codes[warmup + 1 : warmup + 2 * both : 2] = backwards[:both]
        orders.append(Order(codes).on_later_stages(d))
    return Schedule(name="interleaved", num_microbatches=m, placement=Placement.loop(p, v), orders=tuple(orders))


def _check_groups(p: int, m: int, group_size: int | None) -> None:
    if group_size is None:
        if m < p or m % p:
            fix = f"{p}" if m < p else f"{m - m % p} or {m - m % p + p}"
            raise ScheduleError(
                f"num_microbatches={m}: schedule 'interleaved' needs a multiple of num_ranks={p}. Use {fix}."
            )
        return
    n = group_size
    what = f"interleaved with {p} ranks, {m} micro-batches and groups of {n}"
    if not p <= n <= m:
        fix = f"Use {p} micro-batches or more" if m < p else f"Use groups of {p}"
        raise ScheduleError(f"{what}: a group must have at least one micro-batch per rank, and at most all. {fix}.")
    if 0 < m % n < p:
        raise ScheduleError(
            f"{what}: the last group has {counted(m % n, 'micro-batch')} but needs at least {p}. Use {m - m % n} or "
            f"{m - m % n + p} micro-batches."
        )
