"""Hanayo (Liu et al., arXiv:2308.15762): W waves go down and up the ranks, each stage held once.

A rank holds 2W chunks: the stages zig-zag through the ranks, so a micro-batch turns round at the ends without a
message. Whenever a rank is free it runs what is ready. Backwards first and deepest forwards first are tried, with
several numbers of in-flight micro-batches; the shortest order within 1F1B's memory of p rank-shares is used.

    p=2, m=2, one wave
    rank 0  0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
    rank 1  ... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...

The paper gives an idle fraction of ``(2p-2) / (3*p*W + p - 1)`` for m = p and tB = 2*tF; ours is never above it.
"""

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.schedules.table import family
from pipeloom.schedules.weaver import Weaver


@family(
    "hanayo",
    paper="Hanayo, arXiv:2308.15762",
    constraints="v even; bubble formula for m = p",
    bubble="<= (2*p-2)/(3*p*v/2+p-1)",
    peak="<= p",
    chunks=None,
    most_actions=1_000_000,
)
def hanayo(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Waves over a zig-zag placement; two chunks make one wave.

    Raises:
        ScheduleError: an odd number of chunks.
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    if v % 2:
        raise ScheduleError(
            f"num_chunks={v}: schedule 'hanayo' needs an even number of chunks, two per wave. Use {v + 1}."
        )
    placement = Placement.v(p, v)
    streams = [
        [[Action(s, op, b) for b in range(m)] for s in stages for op in (Op.F, Op.B)] for stages in placement.stages_of
    ]
    weaver = Weaver("hanayo", placement, m, streams, units={Op.F: 1, Op.B: 2})
    found: list[tuple[Schedule, int]] = []
    for first in (Op.B, Op.F):
        for in_flight in sorted({min(m, limit) for limit in (p, p + p // 2, 2 * p)}):
            woven = weaver.weave(
                lambda action, first=first: (  # type: ignore[misc]
                    2 * p * v * (action.op is not first) + (-action.stage if action.op is Op.F else action.stage)
                ),
                # A micro-batch enters when the one so many before it has left.
                also_needs={Action(0, Op.F, b): Action(0, Op.B, b - in_flight) for b in range(in_flight, m)},
                most_live=p * v,
            )
            if woven is not None:
                found.append(woven)
    return min(found, key=lambda woven: woven[1])[0]
