"""Chimera (Li and Hoefler, arXiv:2107.06925): two 1F1B pipelines in opposite directions fill each other's bubbles.

Every stage is on two ranks; even micro-batches go down the ranks, odd ones up. Each direction is a 1F1B of its own. A
rank merges its two orders: whenever it is free it runs what is ready, backwards first.

    p=4, m=4
    rank 0  0F0 0F2 ... 3F1 3B1 3F3 3B3 0B0 ... 0B2
    rank 1  ... 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 ...
    rank 2  ... 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 ...
    rank 3  0F1 0F3 ... 3F0 3B0 3F2 3B2 0B1 ... 0B3

For even m >= p the makespan has ``(p-2) * tB`` of bubble at tB = tF and at tB = 2*tF. With m = p rank d holds
``p/2 + 1 + min(d, p-1-d)`` activations, never more than p; weights are held twice.
"""

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.placement import even_near
from pipeloom.schedules.table import family
from pipeloom.schedules.weaver import Weaver


@family(
    "chimera",
    paper="Chimera, arXiv:2107.06925",
    constraints="every stage on two ranks; p even; peak formula for m = p, bubble formula for even m >= p",
    bubble="(2*p-4)/(3*m+2*p-4)",
    peak="p/2 + 1 + min(d, p-1-d)",
    chunks=2,
    most_actions=1_000_000,
)
def chimera(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Bidirectional 1F1B: stage s on ranks s and p-1-s.

    Raises:
        ScheduleError: an odd number of ranks.
    """
    p, m = num_ranks, num_microbatches
    if p % 2:
        raise ScheduleError(f"num_ranks={p}: schedule 'chimera' needs an even number of ranks. Use {even_near(p)}.")
    streams = [[_direction(p, d, range(0, m, 2)), _direction(p, p - 1 - d, range(1, m, 2))] for d in range(p)]
    weaver = Weaver("chimera", Placement.bidirectional(p), m, streams, units={Op.F: 1, Op.B: 1})
    woven = weaver.weave(lambda action: m * (action.op is not Op.B) + (action.microbatch or 0))
    assert woven is not None
    return woven[0]


def _direction(p: int, stage: int, microbatches: range) -> list[Action]:
    warmup = min(p - 1 - stage, len(microbatches))
    order = [Action(stage, Op.F, b) for b in microbatches[:warmup]]
    for i, b in enumerate(microbatches):
        if warmup + i < len(microbatches):
            order.append(Action(stage, Op.F, microbatches[warmup + i]))
        order.append(Action(stage, Op.B, b))
    return order
