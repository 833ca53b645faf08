"""Zero Bubble with hand-made orders: ZB-H1 and ZB-H2 (Qi et al., arXiv:2401.10241).

The backward is split: I passes the gradient on to the stage before, W adds to the weights' gradients and can wait.

    rank 0  0F0 0F1 0F2 ... ... 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  ... 1F0 1F1 ... 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 ... ...
    rank 1  ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 ...
    rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

ZB-H1 keeps 1F1B's memory; its span bubble is ``(p-1) * (tF + tI - tW)`` for m >= p and tW <= tF, tI. ZB-H2 warms up
twice as deep, holds ``2p - 1`` activations on rank 0 and has span bubble ``(p-1) * (tF + tI - 2*tW)`` for m >= 2p-1.
Under a step barrier rank p-1 cannot start before ``(p-1) * tF``, so the makespan never has less bubble than that.
"""

from collections.abc import Sequence

from pipeloom.ir import Op, Placement, Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.table import family


@family(
    "zb-h1",
    paper="Zero Bubble, arXiv:2401.10241",
    constraints="any p >= 1, m >= 1; both formulas for m >= p",
    bubble="(p-1)/(3*m+p-1)",
    peak="p",
)
def zb_h1(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B's warm-up; rank d puts W of a micro-batch d backwards late."""
    return delayed_weights("zb-h1", num_microbatches, [num_ranks - 1 - d for d in range(num_ranks)], delay=1)


@family(
    "zb-h2",
    paper="Zero Bubble, arXiv:2401.10241",
    constraints="any p >= 1, m >= 1; both formulas for m >= 2*p-1",
    bubble="(p-1)/(3*m+p-1)",
    peak="2*p-1",
)
def zb_h2(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Twice the warm-up; rank d puts W of a micro-batch 2d backwards late."""
    return delayed_weights("zb-h2", num_microbatches, [2 * (num_ranks - d) - 2 for d in range(num_ranks)], delay=2)


def delayed_weights(name: str, m: int, warmups: Sequence[int], *, delay: int) -> Schedule:
    """One stage per rank; ``warmups[d]`` forwards first on rank d, W ``delay * d`` backwards late."""
    orders = []
    for d, warmup in enumerate(warmups):
        forward, backward, weight = (d, Op.F), (d, Op.I), (d, Op.W)
        warmup, late = min(warmup, m), min(delay * d, m)
        until, since = m - warmup, late  # the backward up to which forwards are left, and from which on W are due
        lane = Phases()
        lane.repeat(warmup, forward)
        lane.repeat(min(until, since), forward, backward)
        lane.repeat(until - since, forward, backward, weight)
        lane.repeat(since - until, backward)
        lane.repeat(m - max(until, since), backward, weight)
        lane.repeat(late, weight)
        orders.append(lane.order())
    placement = Placement.loop(len(warmups))
    return Schedule(name=name, num_microbatches=m, placement=placement, orders=tuple(orders))
