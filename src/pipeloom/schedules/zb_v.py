"""ZB-V (Qi et al., arXiv:2401.10241, section 6): zero bubble with 1F1B's memory, two chunks per rank in a V.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3 ...
    rank 1  ... 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

Rank d holds stages d and 2p-1-d, so the last stage is on rank 0 and backwards begin there. With equal times of chunks
and m >= 2p-1 the span has no bubble and every rank peaks at exactly 2p chunks; the makespan has (p-1) chunk times.
For m < 2p-1 the order is that of 2p-1 micro-batches without those that do not exist.
"""

from pipeloom.ir import Op, Placement, Schedule
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.sizes import check_sizes
from pipeloom.schedules.table import family


@family(
    "zb-v",
    paper="Zero Bubble, arXiv:2401.10241",
    constraints="v = 2; any p >= 1, m >= 1; both formulas for m >= 2*p-1",
    bubble="(p-1)/(6*m+p-1)",
    peak="p",
    chunks=2,
)
def zb_v(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """The hand-made order of the paper."""
    p, m = num_ranks, max(num_microbatches, 2 * num_ranks - 1)
    check_sizes(p, m, 2)  # sizes before the order is cut
    orders = []
    for d in range(p):
        down, up = d, 2 * p - 1 - d
        whole_down, whole_up = (((stage, Op.F), (stage, Op.I), (stage, Op.W)) for stage in (down, up))
        lane = Phases()
        lane.repeat(2 * (p - d) - 1, (down, Op.F))
        lane.repeat(d, (up, Op.F), (down, Op.F))
        lane.repeat(p - d, *whole_up)
        lane.repeat(m - lane.done(down, Op.F), *whole_down, *whole_up)
        lane.repeat(m - lane.done(up, Op.F), *whole_down[1:], *whole_up)
        lane.repeat(d, (down, Op.I), (up, Op.I))
        lane.repeat(p - d, (down, Op.I), (down, Op.W))
        for stage in (up, down):
            lane.repeat(m - lane.done(stage, Op.W), (stage, Op.W))
        orders.append(lane.order(num_microbatches if num_microbatches < m else None))
    placement = Placement.v(p)
    return Schedule(name="zb-v", num_microbatches=num_microbatches, placement=placement, orders=tuple(orders))
