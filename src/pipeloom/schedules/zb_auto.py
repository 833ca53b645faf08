"""Zero Bubble's automatic scheduler (Qi et al., arXiv:2401.10241): the best of eight greedy runs within a memory cap.

    p=3, m=5, equal times, no limit
    rank 0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 ... ...
    rank 1  ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4 ...
    rank 2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

Warm-up: every rank runs as many forwards as its memory holds and as fit before its first I. Then, round by round, each
rank runs at most one F and one I, and W if it would wait or needs the memory. All combinations of three choices are
tried: whether a rank may delay its first I for another F; whether it may skip an F that would delay its I; whether a W
may start that is longer than a wait. Memory is counted as in the paper: F keeps M_B, I leaves M_W of it, W frees that.

The greedy runs are compared with the hand-made orders that keep the caps (1F1B, GPipe, DAPPLE's PB, ZB-H1 and ZB-H2,
with split backwards), which are shorter with fewer micro-batches than ranks. Of all orders that are at most as long as
the shortest hand-made one, the order with the shortest span is used.
"""

import math
from collections.abc import Iterator
from itertools import product
from operator import add, sub

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.walk import walk
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.table import family
from pipeloom.schedules.zero_bubble import delayed_weights

_NEAR = 1e-9


@family(
    "zb-auto",
    paper="Zero Bubble, arXiv:2401.10241",
    constraints="any p >= 1, m >= 1; bubble formula for m >= 2*p-1 and no memory limit",
    bubble="<= (p-1)/(3*m+p-1)",
    peak="<= m",
    to_measure=True,
    most_actions=1_000_000,
)
def zb_auto(*, num_ranks: int, num_microbatches: int, conditions: Conditions | None = None) -> Schedule:
    """Split backwards, placed for these times, latencies and memory.

    Args:
        num_ranks: p; rank d holds stage d.
        num_microbatches: m.
        conditions: for p stages; equal times, no latency and no limit if not given.

    Raises:
        ScheduleError: conditions for another number of stages or ranks, or a cap below what one micro-batch holds.
    """
    placement = Placement.loop(num_ranks)
    conditions = conditions or Conditions.uniform(placement)
    if conditions.num_stages != num_ranks or conditions.num_ranks != num_ranks:
        raise ScheduleError(
            f"zb-auto on {num_ranks} ranks: conditions are for {conditions.num_stages} stages and "
            f"{conditions.num_ranks} ranks. Give conditions for one stage per rank."
        )
    for rank, (cap, kept) in enumerate(zip(conditions.caps, conditions.activation, strict=True)):
        if kept > cap * (1 + _NEAR):
            raise ScheduleError(
                f"zb-auto: rank {rank} has a cap of {cap:g}, but one micro-batch keeps {kept:g} there. Raise the cap."
            )
    m = num_microbatches
    orders = tuple(map(tuple, _best(conditions, m).orders))
    return Schedule(name="zb-auto", num_microbatches=m, placement=placement, orders=orders)


class _Timed:
    """Orders that grow action by action, each as early as it can start.

    Attributes:
        orders: for each rank, its actions so far.
        fits: whether every rank has stayed within its cap.
    """

    def __init__(self, conditions: Conditions, m: int) -> None:
        p = conditions.num_ranks
        self._conditions, self._p, self._m = conditions, p, m
        self._seconds = {Op.F: conditions.forward, Op.I: conditions.backward_input, Op.W: conditions.backward_weight}
        left, freed = conditions.weight_gradient, [-x for x in conditions.weight_gradient]
        self._kept = {Op.F: conditions.activation, Op.I: [*map(sub, left, conditions.activation)], Op.W: freed}
        self._caps = [cap * (1 + _NEAR) for cap in conditions.caps]
        self._clock = [0.0] * p
        self._first = [0.0] * p
        self._held = [0.0] * p
        self._idle = [0.0] * p  # after the first F
        self._most_idle = 0.0
        self._count = {op: [0] * p for op in (Op.F, Op.I, Op.W)}
        self._ends: dict[tuple[Op, int, int], float] = {}
        self.orders: list[list[Action]] = [[] for _ in range(p)]
        self.fits = True

    @property
    def makespan(self) -> float:
        return max(self._clock)

    @property
    def span(self) -> float:
        """Seconds from the first start to the last end on one rank, for the rank with most."""
        return max(end - first for first, end in zip(self._first, self._clock, strict=True))

    def _arrival(self, op: Op, d: int, b: int) -> float:
        """When the value that `op` of micro-batch b needs from the neighbouring rank is there."""
        source = d - 1 if op is Op.F else d + 1
        if op is Op.W or not 0 <= source < self._p:
            return 0.0
        return self._ends[op, source, b] + self._conditions.latency[source][d]

    def put(self, op: Op, d: int) -> None:
        b = self._count[op][d]
        start = max(self._clock[d], self._arrival(op, d, b))
        if self._count[Op.F][d] == 0:
            self._first[d] = start
        else:
            self._idle[d] += start - self._clock[d]
            self._most_idle = max(self._most_idle, self._idle[d])
        self._clock[d] = self._ends[op, d, b] = start + self._seconds[op][d]
        self._held[d] += self._kept[op][d]
        self.fits = self.fits and self._held[d] <= self._caps[d]
        self._count[op][d] += 1
        self.orders[d].append(Action(d, op, b))


class _Greedy(_Timed):
    """One greedy run of the paper's scheduler."""

    def __init__(self, conditions: Conditions, m: int, fits_only: bool, may_skip: bool, stretch: bool) -> None:
        super().__init__(conditions, m)
        self._may_skip, self._stretch = may_skip, stretch
        self._warm_up(fits_only)
        for _ in range(1, m):
            self._round()
        for d in range(self._p):
            self._fill(d, math.inf)

    def _room(self, d: int, more: float = 0.0) -> bool:
        """Whether rank d can hold one more activation, beside `more`."""
        return self._held[d] + more + self._conditions.activation[d] <= self._caps[d]

    def _pending(self, d: int) -> bool:
        return self._count[Op.W][d] < self._count[Op.I][d]

    def _fill(self, d: int, until: float) -> None:
        """Run W while rank d waits; a W longer than the wait if `stretch`, or if the longest idle time stays."""
        seconds = self._seconds[Op.W][d]
        while self._pending(d) and self._clock[d] + seconds <= until:
            self.put(Op.W, d)
        gap = until - self._clock[d]
        if self._pending(d) and gap > 0 and (gap > self._most_idle - self._idle[d] or self._stretch):
            self.put(Op.W, d)

    def _warm_up(self, fits_only: bool) -> None:
        p, forward = self._p, self._seconds[Op.F]
        for d in range(p):
            self.put(Op.F, d)
        extra = [0] * p
        arrival = 0.0  # of the first I's input
        for d in reversed(range(p)):
            clock = self._clock[d]
            if d < p - 1:
                arrival += self._conditions.latency[d + 1][d]
                kept = self._conditions.activation[d]
                while (
                    1 + extra[d] < self._m
                    and self._room(d, extra[d] * kept)
                    and (clock + forward[d] <= arrival if fits_only else clock < arrival)
                ):
                    clock += forward[d]
                    extra[d] += 1
            arrival = max(clock, arrival) + self._seconds[Op.I][d]
        for d in range(p):
            if d:
                extra[d] = max(0, min(extra[d], extra[d - 1] - 1))
            for _ in range(extra[d]):
                self.put(Op.F, d)
        for d in reversed(range(p)):
            self.put(Op.I, d)

    def _round(self) -> None:
        """At most one F on every rank, top down, then one I, bottom up."""
        go = [self._wants_forward(d) for d in range(self._p)]
        for d in reversed(range(self._p - 1)):
            go[d] = go[d] and (go[d + 1] or self._count[Op.F][d] == self._count[Op.I][d])
        for d in range(self._p):
            if not go[d]:
                continue
            while not self._room(d):
                self.put(Op.W, d)
            self._fill(d, self._arrival(Op.F, d, self._count[Op.F][d]))
            self.put(Op.F, d)
        for d in reversed(range(self._p)):
            if d == 0 and self._count[Op.F][0] == self._m:
                self._fill(0, math.inf)
            self._fill(d, self._arrival(Op.I, d, self._count[Op.I][d]))
            self.put(Op.I, d)

    def _wants_forward(self, d: int) -> bool:
        """Whether rank d runs an F in this round; it can skip it if the next rank is far behind."""
        done = self._count[Op.F]
        if done[d] == self._m:
            return False
        if not self._may_skip or d == self._p - 1 or done[d] < done[d + 1] + 2:
            return True
        limit = self._clock[d + 1] + self._seconds[Op.F][d + 1] + self._seconds[Op.I][d + 1]
        limit += self._conditions.latency[d + 1][d]
        if self._clock[d] >= limit:
            return False
        needed, freed = 0.0, 0.0
        while not self._room(d, -freed):
            needed += self._seconds[Op.W][d]
            freed += self._conditions.weight_gradient[d]
        if self._clock[d] + self._seconds[Op.F][d] + needed <= limit:
            return True
        return limit - self._clock[d] > self._most_idle - self._idle[d]


def _best(conditions: Conditions, m: int) -> _Timed:
    """The greedy run or hand-made order with the shortest span, within the makespan of the hand-made orders."""
    each = zip(conditions.forward, conditions.backward_input, conditions.backward_weight, strict=True)
    busy, arrival = [m * sum(seconds) for seconds in each], [0.0]
    for d, seconds in enumerate(conditions.forward[:-1]):
        arrival.append(arrival[d] + seconds + conditions.latency[d][d + 1])
    span, makespan = (max(bound) * (1 + _NEAR) for bound in (busy, map(add, busy, arrival)))  # without a bubble
    greedy: list[_Timed] = []
    for choices in product((True, False), repeat=3):
        greedy.append(_Greedy(conditions, m, *choices))
        if greedy[-1].span <= span and greedy[-1].makespan <= makespan:
            return greedy[-1]  # none is better
    handmade = list(_handmade(conditions, m))
    longest = min(timed.makespan for timed in handmade) * (1 + _NEAR)
    allowed = [timed for timed in (*greedy, *handmade) if timed.makespan <= longest]
    return min(allowed, key=lambda timed: timed.span)


def _handmade(conditions: Conditions, m: int) -> Iterator[_Timed]:
    """Hand-made orders with split backwards that keep the caps, the one that holds least (naive) first."""
    p = conditions.num_ranks
    one = [p - 1 - d for d in range(p)]
    two = [2 * warmup for warmup in one]
    for warmups, delay in (([0] * p, 0), (one, 0), (two, 0), ([m] * p, 0), (one, 1), (two, 2)):
        timed = _Timed(conditions, m)
        for rank, action, _ in walk(delayed_weights("zb-auto", m, warmups, delay=delay)):
            timed.put(action.op, rank)
            if not timed.fits:
                break
        else:
            yield timed
