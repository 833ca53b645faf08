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
from itertools import accumulate, islice
from math import inf

from pipeloom.ir import Action, Op, Orders, Placement, Schedule
from pipeloom.schedules.table import family

_PERIOD = 6  # F, I and W of two chunks
_HORIZON = 2 * _PERIOD  # how far ahead a waiting rank looks


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
    repeated = [_repeat(d, len(blocks), block, m) for d, block in enumerate(blocks)]
    change = {Op.F: 1, Op.I: 0, Op.W: -1}  # of live activations
    cap = max(max(accumulate(change[action.op] for action in order)) for order in repeated)
    candidates = [_squeeze(repeated, m, cap, horizon) for horizon in (_HORIZON, 1)]
    candidates.append((_makespan(repeated, m), tuple(map(tuple, repeated))))
    _, orders = min(candidates, key=lambda candidate: candidate[0])
    return Schedule(name=name, num_microbatches=m, placement=Placement.v(len(blocks)), orders=orders)


def _repeat(d: int, p: int, block: tuple[int, int, int, int], m: int) -> list[Action]:
    """One rank's order of the repeated block; each W takes the first slot of the period that is free after its I."""
    down, up = d, 2 * p - 1 - d
    taken = {time % _PERIOD for time in block}
    timed = list(zip(block, (down, up, up, down), (Op.F, Op.F, Op.I, Op.I), strict=True))
    for stage, after in ((up, block[2]), (down, block[3])):
        time = next(t for t in range(after + 1, after + _PERIOD) if t % _PERIOD not in taken)
        taken.add(time % _PERIOD)
        timed.append((time, stage, Op.W))
    moments = sorted((time + _PERIOD * b, stage, op, b) for b in range(m) for time, stage, op in timed)
    return [Action(stage, op, b) for _, stage, op, b in moments]


class _Clock:
    """Which forwards and backwards have ended, when every action takes one unit of time."""

    def __init__(self, num_stages: int, m: int) -> None:
        self._last = num_stages - 1
        self._ended = {op: [[inf] * m for _ in range(num_stages)] for op in (Op.F, Op.I, Op.W)}

    def run(self, action: Action, now: int) -> None:
        stage, op, b, _ = action
        assert b is not None
        self._ended[op][stage][b] = now + 1

    def start(self, action: Action) -> float:
        """The first moment at which `action` could start, infinity while that is unknown."""
        stage, op, b, _ = action
        assert b is not None
        if op is Op.F:
            return self._ended[op][stage - 1][b] if stage else 0
        if op is Op.W:
            return self._ended[Op.I][stage][b]
        here = self._ended[Op.F][stage][b]
        return here if stage == self._last else max(here, self._ended[op][stage + 1][b])


def _makespan(orders: list[list[Action]], m: int) -> int:
    clock, position, now = _Clock(2 * len(orders), m), [0] * len(orders), 0
    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        ready = [
            d for d, order in enumerate(orders) if position[d] < len(order) and clock.start(order[position[d]]) <= now
        ]
        for d in ready:
            clock.run(orders[d][position[d]], now)
            position[d] += 1
        now += 1
    return now


def _squeeze(orders: list[list[Action]], m: int, cap: int, horizon: int) -> tuple[int, Orders]:
    """The makespan and the orders if every rank runs what is ready, with at most `cap` live activations.

    A rank takes the next F or I of its order if it is ready; else a ready one of the next `horizon` that leaves room
    for those it overtakes; else a W. An F without room waits for a W. W may run directly after its I, so the room that
    an order needs can always be made and no rank blocks.
    """
    ranks = range(len(orders))
    clock = _Clock(2 * len(orders), m)
    todo = [[action for action in order if action.op is not Op.W] for order in orders]
    weights: list[deque[Action]] = [deque() for _ in ranks]  # W that may run
    live, now, makespan = [0 for _ in ranks], 0, 0
    done: list[list[Action]] = [[] for _ in ranks]
    awake = set(ranks)  # a rank that finds nothing to do sleeps until a neighbour has run something
    while awake:
        woken: set[int] = set()
        for d in awake:
            chosen = _choose(todo[d], weights[d], live[d], cap, horizon, clock, now)
            if chosen is None:
                continue
            place, action = chosen
            if action.op is Op.W:
                weights[d].popleft()
                live[d] -= 1
            else:
                del todo[d][place]
                clock.run(action, now)
                live[d] += action.op is Op.F
                if action.op is Op.I:
                    weights[d].append(action.with_op(Op.W))
            done[d].append(action)
            woken.update((d - 1, d, d + 1))
            makespan = now + 1
        awake = woken.intersection(ranks)
        now += 1
    return makespan, tuple(map(tuple, done))


def _choose(
    todo: list[Action], weights: deque[Action], live: int, cap: int, horizon: int, clock: _Clock, now: int
) -> tuple[int, Action] | None:
    """The action that a rank starts, with the position of an F or I in `todo`."""
    planned = highest = live - len(weights)  # what would be live if no W were pending
    forward: tuple[int, Action] | None = None
    for place, action in enumerate(islice(todo, horizon)):
        if clock.start(action) <= now:
            if place == 0 and action.op is Op.F and live == cap:
                return 0, weights[0]
            if place == 0 or action.op is Op.I:
                return place, action
            if forward is None and highest < cap and live < cap:
                forward = place, action
        planned += 1 if action.op is Op.F else -1
        highest = max(highest, planned)
    if forward is not None:
        return forward
    return (0, weights[0]) if weights else None
