"""Exact search for tiny steps: dynamic programming over partial schedules, with dominance and bounds.

Actions are added one by one. Two partial schedules ("beginnings") with the same actions differ only in when each rank
is free and when in-flight values arrive. If one is nowhere later than the other, only that one is continued. Beginnings
whose bound is not below the best known makespan are dropped.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Self

from pipeloom.ir import Action, Op, Placement
from pipeloom.schedules.conditions import PER_STAGE, Conditions
from pipeloom.schedules.search.bounds import away, heads_and_tails
from pipeloom.schedules.search.operations import IntOrders, Work

_NEAR = 1e-9


@dataclass(frozen=True, slots=True)
class _Beginning:
    """A partial schedule: when each rank is free, when in-flight values arrive, and its last action and parent."""

    free: tuple[float, ...]
    arrivals: tuple[tuple[int, float], ...]  # action that waits for the value, and when it is there
    reach: float  # no continuation is shorter for what has been put in
    bound: float  # no continuation is shorter
    last: int
    parent: Self | None


def shortest(work: Work, makespan: float, width: int) -> tuple[float, IntOrders | None, float]:
    """The shortest makespan below `makespan`, its orders (None if there are none), and a lower bound.

    Args:
        work: the step; every stage on one rank.
        makespan: the best known makespan.
        width: beginnings kept per number of actions. If there are never more, the bound is exact.
    """
    return _Exact(work, width, *heads_and_tails(work)).run(makespan)


def bound_alone(work: Work, rank: int, makespan: float, least: float, width: int) -> float:
    """A lower bound from one rank alone, as if all other ranks had unlimited devices.

    Args:
        work: the step; every stage on one rank.
        rank: the rank whose actions are ordered; actions of other ranks become delays.
        makespan: the best known makespan.
        least: the best known bound; returned if no better one is found.
        width: as in `shortest`.
    """
    stages, given = work.placement.stages_of[rank], work.conditions
    mine: dict[str, Any] = {what: tuple(getattr(given, what)[s] for s in stages) for what in PER_STAGE}
    conditions = Conditions(latency=((0.0,),), caps=(given.caps[rank],), **mine)
    alone = Work(Placement(((0,),) * len(stages)), work.num_microbatches, conditions)
    down, up = away(work, stages)
    heads, tails = heads_and_tails(work)
    theirs = [work.number[Action(stages[s], op, b)] for s, op, b, _ in alone.actions]
    for n, (stage, op, b, _) in enumerate(alone.actions):
        if op is Op.F and stage:
            alone.lag[n] = down[stage - 1]
        elif op is Op.I:
            alone.lag[n] = up[stage]
            if stage == len(stages) - 1:
                forward = alone.number[Action(stage, Op.F, b)]
                alone.before[n], alone.after[forward] = forward, n
    return _Exact(alone, width, [heads[n] for n in theirs], [tails[n] for n in theirs]).run(makespan, least)[2]


class _Exact:
    def __init__(self, work: Work, width: int, heads: list[float], tails: list[float]) -> None:
        self._work, self._width, self._heads, self._tails = work, width, heads, tails
        # For each stage the numbers of F, I and W of micro-batch 0; those of the next are `_per` higher.
        self._letters = [
            tuple(work.number[Action(s, op, 0)] for op in (Op.F, Op.I, Op.W)) for s in range(work.placement.num_stages)
        ]
        self._per, self._m = 3 * work.placement.num_stages, work.num_microbatches

    def run(self, makespan: float, least: float = -math.inf) -> tuple[float, IntOrders | None, float]:
        """See `shortest`; ends early where the bound cannot come above `least`."""
        work = self._work
        ranks = work.placement.num_ranks
        start = _Beginning((0.0,) * ranks, (), 0.0, 0.0, -1, None)
        layer: dict[tuple[int, ...], list[_Beginning]] = {(0,) * len(self._letters) * 3: [start]}
        best, end, dropped = makespan, None, makespan
        for _ in range(len(work.actions)):
            following: dict[tuple[int, ...], list[_Beginning]] = {}
            for counts, beginnings in layer.items():
                for place, n in self._open(counts):
                    reached = (*counts[:place], counts[place] + 1, *counts[place + 1 :])
                    others = following.setdefault(reached, [])
                    left = [0.0] * ranks  # seconds of what each rank has still to run
                    for count, number in zip(reached, itertools.chain(*self._letters), strict=True):
                        left[work.rank[number]] += (self._m - count) * work.seconds[number]
                    for beginning in beginnings:
                        made = self._put(beginning, n, left)
                        if made.bound < best * (1 - _NEAR):
                            _keep(others, made)
            layer, lost = self._narrow(following)
            dropped = min(dropped, lost)
            if dropped <= least:
                return best, None, least
        for beginnings in layer.values():
            for beginning in beginnings:
                if beginning.bound < best:
                    best, end = beginning.bound, beginning
        if end is None:
            return best, None, min(best, dropped)
        orders: IntOrders = [[] for _ in range(ranks)]
        while end is not None and end.last >= 0:
            orders[work.rank[end.last]].append(end.last)
            end = end.parent
        orders = [order[::-1] for order in orders]
        return work.makespan(orders), orders, min(best, dropped)

    def _open(self, counts: tuple[int, ...]) -> list[tuple[int, int]]:
        """Place and number of each action that can be added next: in order, with its needs and memory available."""
        work = self._work
        held = [0.0] * work.placement.num_ranks
        for stage, (f, i, w) in enumerate(self._letters):
            forwards, backwards, weights = counts[3 * stage : 3 * stage + 3]
            held[work.rank[f]] += forwards * work.takes[f] - backwards * work.frees[i] - weights * work.frees[w]
        found = []
        for stage, numbers in enumerate(self._letters):
            forwards, backwards, weights = counts[3 * stage : 3 * stage + 3]
            f, i, w = numbers
            rank = work.rank[f]
            sent = counts[3 * stage - 3] if stage else self._m
            back = counts[3 * stage + 4] if stage + 1 < len(self._letters) else self._m
            if forwards < sent and held[rank] + work.takes[f] <= work.caps[rank]:
                found.append((3 * stage, f + forwards * self._per))
            if backwards < min(forwards, back):
                found.append((3 * stage + 1, i + backwards * self._per))
            if weights < backwards:
                found.append((3 * stage + 2, w + weights * self._per))
        return found

    def _put(self, beginning: _Beginning, n: int, left: list[float]) -> _Beginning:
        """`beginning` and then action `n`, after which each rank has `left` seconds to run."""
        ranks, seconds, tails = self._work.rank, self._work.seconds, self._tails
        rank = ranks[n]
        start = max(beginning.free[rank], self._heads[n])
        arrivals = []
        for waiting in beginning.arrivals:
            if waiting[0] != n:
                arrivals.append(waiting)
            elif waiting[1] > start:
                start = waiting[1]
        end = start + seconds[n]
        free = (*beginning.free[:rank], end, *beginning.free[rank + 1 :])
        reach = max(beginning.reach, end + tails[n])
        bound = max(reach, end + left[rank], beginning.bound)
        user = self._work.after[n]
        if user >= 0:
            arrivals.append((user, end + self._work.lag[user]))
            arrivals.sort()
        for place, (user, arrival) in enumerate(arrivals):
            # A value that waits for its rank might as well come when the rank is free.
            if arrival < free[ranks[user]]:
                arrival = free[ranks[user]]
                arrivals[place] = (user, arrival)
            if arrival + seconds[user] + tails[user] > bound:
                bound = arrival + seconds[user] + tails[user]
        return _Beginning(free, tuple(arrivals), reach, bound, n, beginning)

    def _narrow(
        self, layer: dict[tuple[int, ...], list[_Beginning]]
    ) -> tuple[dict[tuple[int, ...], list[_Beginning]], float]:
        """The best of the layer, and the least bound of what is dropped."""
        ranked = sorted(
            (
                (each.bound, sum(each.free), number, counts, each)
                for number, (counts, row) in enumerate(layer.items())
                for each in row
            ),
            key=lambda item: item[:3],
        )
        kept: dict[tuple[int, ...], list[_Beginning]] = {}
        for _, _, _, counts, each in ranked[: self._width]:
            kept.setdefault(counts, []).append(each)
        return kept, ranked[self._width][0] if len(ranked) > self._width else math.inf


def _keep(others: list[_Beginning], made: _Beginning) -> None:
    """Add a beginning unless one with the same actions is nowhere later; drop those that it beats in turn."""
    times = (made.reach, *made.free, *(arrival for _, arrival in made.arrivals))
    beaten = []
    for place, other in enumerate(others):
        theirs = (other.reach, *other.free, *(arrival for _, arrival in other.arrivals))
        if all(a <= b for a, b in zip(theirs, times, strict=True)):
            return
        if all(a <= b for a, b in zip(times, theirs, strict=True)):
            beaten.append(place)
    for place in reversed(beaten):
        del others[place]
    others.append(made)
