"""V-Min and V-Half: a third and half of 1F1B's memory (Qi et al., arXiv:2405.15362).

Two chunks per rank in a V, with split backwards. The building block, the times of F and I of one micro-batch, is placed
by hand and repeated every six chunk times. The block determines how long activations live, and so peak memory. Then
all actions move to the front: W fills waits, and a rank that would still wait runs a later forward or backward that is
ready, as long as the peak does not rise.

    V-Half, p=2, m=4
    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 0W0 0F3 3W1 3F2 0I1 3I2 0W1 3W2 3F3 3I3 0I2 3W3 0I3 0W2 0W3 ...
    rank 1  ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3

    V-Min, p=3, m=3
    rank 0  0F0 0F1 0F2 ... ... 5F0 5I0 5W0 ... ... 5F1 0I0 5I1 0W0 5W1 5F2 5I2 0I1 5W2 0W1 ... 0I2 0W2
    rank 1  ... 1F0 1F1 1F2 4F0 ... ... 4I0 4W0 4F1 1I0 1W0 ... 4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 ...
    rank 2  ... ... 2F0 3F0 2F1 3F1 ... ... 3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 ...

In chunk times of F, I and W alike, for enough micro-batches (1F1B idles 6(p-1) of them and peaks at p rank-shares):

    V-Half   idle at most 3(p-1)   peak floor((p+2)/2) rank-shares
    V-Min    idle at most 4(p-1)   peak floor((p+4)/3) rank-shares
"""

from collections import deque
from itertools import accumulate

from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.order import MICROBATCH_STEP, Order, encode
from pipeloom.schedules.table import family

_PERIOD = 6  # F, I and W of two chunks
_HORIZON = 2 * _PERIOD  # how far ahead a waiting rank looks
# The actions of a rank are numbers: kind * m + micro-batch. F and I first, so the W of an I has its number + 2m.
_KINDS = F_DOWN, F_UP, I_UP, I_DOWN, W_UP, W_DOWN = range(_PERIOD)
_OPS = Op.F, Op.F, Op.I, Op.I, Op.W, Op.W
_CHANGES = 1, 1, 0, 0, -1, -1  # of live activations


@family(
    "v-half",
    paper="controllable memory, arXiv:2405.15362",
    constraints="v = 2; any p >= 1, m >= 1; bubble formula for m >= 2*p",
    bubble="<= (p-1)/(2*m+p-1)",
    peak="<= (p+2)//2",
    chunks=2,
    most_actions=1_000_000,
)
def v_half(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's memory, half of its bubble."""
    p, delta = num_ranks, 3 if num_ranks % 2 == 0 else 0
    blocks = [(2 * d, 3 * p - 2 - d, 3 * p - 1 + delta + 2 * d, 6 * p - 2 + delta - d) for d in range(p)]
    return _build("v-half", blocks, num_microbatches)


@family(
    "v-min",
    paper="controllable memory, arXiv:2405.15362",
    constraints="v = 2; any p >= 1, m >= 1; bubble formula for m >= 2*p",
    bubble="<= (2*p-2)/(3*m+2*p-2)",
    peak="<= (p+4)//3",
    chunks=2,
    most_actions=1_000_000,
)
def v_min(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's memory, two thirds of its bubble."""
    p, delta = num_ranks, 2 if num_ranks % 3 == 0 else 0
    blocks = [(d, 2 * p - 1 - d, 2 * p + delta + d, 4 * p + delta - 1 - d) for d in range(p)]
    return _build("v-min", blocks, num_microbatches)


def _build(name: str, blocks: list[tuple[int, int, int, int]], m: int) -> Schedule:
    """`blocks`: for each rank, the times of F down, F up, I up and I down of micro-batch 0."""
    p = len(blocks)
    repeated = [_repeat(block, m) for block in blocks]
    cap = max(max(accumulate(_CHANGES[number // m] for number in order)) for order in repeated)
    candidates = [_squeeze(repeated, m, cap, horizon) for horizon in (_HORIZON, 1)]
    candidates.append((_makespan(repeated, m), repeated))
    _, orders = min(candidates, key=lambda candidate: candidate[0])
    return Schedule(
        name=name,
        num_microbatches=m,
        placement=Placement.v(p),
        orders=tuple(_order(d, p, numbers, m) for d, numbers in enumerate(orders)),
    )


def _order(d: int, p: int, numbers: list[int], m: int) -> Order:
    """The actions of rank d."""
    stages = (d, 2 * p - 1 - d, 2 * p - 1 - d, d, 2 * p - 1 - d, d)
    codes: list[int] = []
    for stage, op in zip(stages, _OPS, strict=True):
        first = encode(Action(stage, op, 0))
        codes += range(first, first + m * MICROBATCH_STEP, MICROBATCH_STEP)
    return Order(map(codes.__getitem__, numbers))


def _repeat(block: tuple[int, int, int, int], m: int) -> list[int]:
    """One rank's order of the repeated block; each W takes the first slot of the period that is free after its I."""
    taken = {time % _PERIOD for time in block}
    times = list(block)
    for after in block[I_UP:]:
        time = next(t for t in range(after + 1, after + _PERIOD) if t % _PERIOD not in taken)
        taken.add(time % _PERIOD)
        times.append(time)
    slots = sorted((time % _PERIOD, time // _PERIOD, kind) for kind, time in enumerate(times))
    periods = range(m + max(late for _, late, _ in slots))
    return [kind * m + q - late for q in periods for _, late, kind in slots if 0 <= q - late < m]


class _Ready:
    """Which forwards and backwards can run.

    Attributes:
        now: for each rank, whether an F or I can start, by number.
        count: for each rank, how many can start that have not run.
    """

    def __init__(self, p: int, m: int) -> None:
        self._m = m
        self._missing = [
            bytearray(b"".join(bytes([self._needs(d, kind)]) * m for kind in range(W_UP))) for d in range(p)
        ]
        self.now = [bytearray(not missing for missing in rank) for rank in self._missing]
        self.count = [sum(rank) for rank in self.now]
        self._users = [
            [[(rank, (user - kind) * m) for rank, user in self._used_by(d, kind, p)] for kind in range(W_UP)]
            for d in range(p)
        ]

    @staticmethod
    def _needs(d: int, kind: int) -> int:
        """How many actions of the same micro-batch an action waits for."""
        if kind in (F_DOWN, I_UP):
            return (d > 0) + (kind == I_UP)
        return 1 + (kind == I_DOWN)

    @staticmethod
    def _used_by(d: int, kind: int, p: int) -> list[tuple[int, int]]:
        """The actions, by rank and kind, that wait for one."""
        down, here = kind in (F_DOWN, I_UP), {F_DOWN: [(d, I_DOWN)], F_UP: [(d, I_UP)]}.get(kind, [])
        if down:
            return [*here, (d + 1, kind) if d < p - 1 else (d, kind + 1)]
        return [*here, (d - 1, kind)] if d else here

    def end(self, ended: list[tuple[int, int]]) -> set[int]:
        """Note F and I that have ended, by rank and number; returns the ranks that can start more."""
        m, woken = self._m, set()
        for d, number in ended:
            for rank, offset in self._users[d][number // m]:
                index, missing = number + offset, self._missing[rank]
                missing[index] -= 1
                if not missing[index]:
                    self.now[rank][index] = 1
                    self.count[rank] += 1
                    woken.add(rank)
        return woken


def _makespan(orders: list[list[int]], m: int) -> int:
    """When each action runs as early as it can, in this order."""
    ready, position, first_weight = _Ready(len(orders), m), [0] * len(orders), W_UP * m
    awake, now = set(range(len(orders))), 0
    while awake:
        ended, ran = [], set()
        for d in awake:
            at, order = position[d], orders[d]
            if at < len(order) and (order[at] >= first_weight or ready.now[d][order[at]]):
                position[d] += 1
                ran.add(d)
                if order[at] < first_weight:
                    ended.append((d, order[at]))
        now += bool(ran)
        awake = ran | ready.end(ended)
    return now


def _squeeze(orders: list[list[int]], m: int, cap: int, horizon: int) -> tuple[int, list[list[int]]]:
    """The makespan and the orders if every rank runs what is ready, with at most `cap` live activations.

    A rank takes the next F or I of its order if it is ready; else a ready one of the next `horizon` that leaves room
    for those it overtakes; else a W. An F without room waits for a W. W may run directly after its I, so the room that
    an order needs can always be made and no rank blocks.
    """
    ready, first_weight = _Ready(len(orders), m), W_UP * m
    ranks = [_Rank([number for number in order if number < first_weight], m, cap, horizon) for order in orders]
    awake, now = set(range(len(orders))), 0
    while awake:  # a rank that finds nothing to do sleeps until something that it waits for has ended
        ended, ran = [], set()
        for d in awake:
            number = ranks[d].run_next(ready.now[d] if ready.count[d] else None)
            if number is None:
                continue
            ran.add(d)
            if number < first_weight:
                ready.now[d][number] = 0
                ready.count[d] -= 1
                ended.append((d, number))
        now += bool(ran)
        awake = ran | ready.end(ended)
    return now, [rank.done for rank in ranks]


class _Rank:
    """What a rank has to do, and has done.

    Attributes:
        done: the actions that it has run.
    """

    def __init__(self, todo: list[int], m: int, cap: int, horizon: int) -> None:
        self._todo, self._m, self._cap, self._horizon = todo, m, cap, horizon
        self._live = 0
        self._weights: deque[int] = deque()  # W that may run
        self.done: list[int] = []

    def run_next(self, ready: bytearray | None) -> int | None:
        """Run one action, if there is one; `ready`: which F and I can start, None for none of them."""
        place = None if ready is None else self._choose(ready)
        if place is not None:
            number = self._todo.pop(place)
            if number < I_UP * self._m:
                self._live += 1
            else:
                self._weights.append(number + (W_UP - I_UP) * self._m)
        elif self._weights:
            number = self._weights.popleft()
            self._live -= 1
        else:
            return None
        self.done.append(number)
        return number

    def _choose(self, ready: bytearray) -> int | None:
        """The position in `todo` of the F or I that starts; None if a W goes first."""
        live, cap, backwards, todo = self._live, self._cap, I_UP * self._m, self._todo
        if ready[todo[0]]:
            return None if todo[0] < backwards and live == cap else 0
        forward = None
        planned = highest = live - len(self._weights)  # what would be live if no W were pending
        for place, number in enumerate(todo[: self._horizon]):
            if ready[number]:
                if number >= backwards:
                    return place
                if forward is None and highest < cap and live < cap:
                    forward = place
            planned += 1 if number < backwards else -1
            if planned > highest:
                highest = planned
        return forward
