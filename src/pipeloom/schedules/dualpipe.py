"""DualPipe (DeepSeek-V3, arXiv:2412.19437) and DualPipeV: forwards of one direction overlap backwards of the other.

DualPipe holds every stage twice: even micro-batches go down the ranks, odd ones up. DualPipeV gives each rank two
chunks in a V instead. In steady state a rank runs F of one direction and B of the other as one unit, which hides the
communication of both (`Schedule.overlapped`). DualPipeV is the "cut-in-half" variant (Sea AI Lab, blog post, 2025).

    DualPipe, p=2, m=4 (B takes two columns, an overlapped pair three)
    rank 0  0F0 1F1 0F2 1B1 --- 1F3 0B0 --- 1B3 --- 0I2 0W2
    rank 1  0F1 1F0 0F3 1B0 --- 1F2 0B1 --- 1B2 --- 0I3 0W3

    DualPipeV, p=2, m=4
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- ... 3F2 0B0 --- 3B2 --- ... 3F3 0B1 --- 3B3 --- 0I2 0W2 0I3 0W3
    rank 1  ... 1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- ... 2I3 1I3 2W3 1W3

With F = I, W <= F and an overlapped pair of t_FB, no rank of DualPipe idles longer than ``(p/2-1)(t_FB + tB - 3*tW)``,
and it holds ``p + 1`` activations. DualPipeV on p ranks has the bubble of DualPipe on 2p in chunk times, and holds
``2p + 1`` chunks. On rank 0 of either, and in the middle, eight phases follow each other:

    1 F of the near direction   2 F of both in turn   3 I, W, F of the far one   4 overlapped pairs, both ways
    5 B, then an overlapped pair   6 B of both, the later ones split   7 a W, then I   8 the W that are left
"""

from collections import deque
from collections.abc import Sequence

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.placement import even_near
from pipeloom.schedules.table import family


@family(
    "dualpipe",
    paper="DualPipe, arXiv:2412.19437",
    constraints="every stage on two ranks; p even, m even, m >= 2*p",
    bubble="(p-2)/(3*m+p-2)",
    peak="p+1",
    chunks=2,
)
def dualpipe(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Bidirectional: stage s on ranks s and p-1-s.

    Raises:
        ScheduleError: an odd number of ranks or micro-batches, or fewer micro-batches than 2p.
    """
    p, m = num_ranks, num_microbatches
    if p % 2:
        raise ScheduleError(
            f"num_ranks={p}: schedule 'dualpipe' needs an even number of ranks. Use {even_near(p)}, or use dualpipev."
        )
    if m % 2 or m < 2 * p:
        raise ScheduleError(
            f"num_microbatches={m}: schedule 'dualpipe' on {p} ranks needs an even number of at least {2 * p}. "
            f"Use {max(2 * p, m + m % 2)}."
        )

    ranks = []
    for d in range(p):
        lanes = [(d, 0, 2), (p - 1 - d, 1, 2)]  # phase 0 is the direction that enters at the nearer end
        ranks.append(_RankOrder(min(d, p - 1 - d), p // 2, m // 2, lanes if d < p // 2 else lanes[::-1]))
    return _schedule("dualpipe", m, Placement.bidirectional(p), ranks)


@family(
    "dualpipev",
    paper="DualPipeV: DualPipe cut in half, Sea AI Lab 2025",
    constraints="v = 2; m >= 2*p",
    bubble="(p-1)/(3*m+p-1)",
    peak="p+1/2",
    chunks=2,
)
def dualpipev(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Two chunks per rank in a V.

    Raises:
        ScheduleError: fewer micro-batches than 2p.
    """
    p, m = num_ranks, num_microbatches
    if m < 2 * p:
        raise ScheduleError(
            f"num_microbatches={m}: schedule 'dualpipev' on {p} ranks needs at least {2 * p}. Use {2 * p}."
        )

    ranks = [_RankOrder(d, p, m, [(d, 0, 1), (2 * p - 1 - d, 0, 1)]) for d in range(p)]
    return _schedule("dualpipev", m, Placement.v(p), ranks)


class _RankOrder:
    """One rank's order.

    Args:
        h: distance of the rank from its nearer end.
        half: ranks from an end to the middle.
        count: micro-batches of each of the two phases.
        lanes: for each phase its stage, its first micro-batch, and the step to the next one.
    """

    def __init__(self, h: int, half: int, count: int, lanes: Sequence[tuple[int, int, int]]) -> None:
        self.order: list[Action] = []
        self.overlapped: list[tuple[Action, Action]] = []
        self._lanes = lanes
        self._done = {(forward, phase): 0 for forward in (True, False) for phase in (0, 1)}
        self._weights: deque[Action] = deque()  # W that are due, first in, first out
        outer = half - h - 1
        for _ in range(2 * outer):
            self._run(Op.F, 0)
        for _ in range(h + 1):
            self._run(Op.F, 0)
            self._run(Op.F, 1)
        for _ in range(outer):
            self._run(Op.I, 1)
            self.order.append(self._weights.popleft())
            self._run(Op.F, 1)
        for i in range(count - 2 * half + h + 1):
            if i == 0 and outer == 0:  # in the middle the first B waits for this very F
                self._run(Op.F, 0)
                self._run(Op.B, 1)
            else:
                self._both(0, 1)
            self._both(1, 0)
        for _ in range(outer):
            self._run(Op.B, 1)
            self._both(1, 0)
        for i in range(2 * (h + 1)):  # B1, B0, B1, B0, ...: the second half is split
            self._run(Op.I if i >= h + 1 else Op.B, 1 - i % 2)
        for _ in range(outer):
            self.order.append(self._weights.popleft())
            self._run(Op.I, 0)
        self.order += self._weights

    def _run(self, op: Op, phase: int) -> Action:
        """Append the next F, B or I of a phase; the W of an I is due later."""
        stage, first, step = self._lanes[phase]
        number = self._done[op is Op.F, phase]
        self._done[op is Op.F, phase] += 1
        action = Action(stage, op, first + number * step)
        self.order.append(action)
        if op is Op.I:
            self._weights.append(action.with_op(Op.W))
        return action

    def _both(self, forward: int, backward: int) -> None:
        self.overlapped.append((self._run(Op.F, forward), self._run(Op.B, backward)))


def _schedule(name: str, m: int, placement: Placement, ranks: list[_RankOrder]) -> Schedule:
    return Schedule(
        name=name,
        num_microbatches=m,
        placement=placement,
        orders=tuple(tuple(rank.order) for rank in ranks),
        overlapped=frozenset(pair for rank in ranks for pair in rank.overlapped),
    )
