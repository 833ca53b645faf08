"""Greedy phase of the search: squeeze an order in time, taking what is ready instead of waiting."""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from pipeloom.ir.action import Op
from pipeloom.schedules.search_work import IntOrders, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What a rank does when the next F or I of its order is not ready.

    Attributes:
        backwards_first: whether an I that is ready goes before an F that is next.
        weights_first: whether a wait is filled with W before later F.
        stretch: by what part of its time an action may run on beyond a wait whose end is known.
        horizon: how many F and I of its order it looks ahead.
    """

    backwards_first: bool
    weights_first: bool
    stretch: float
    horizon: int


def squeeze(work: Work, base: IntOrders, rule: Rule) -> IntOrders:
    """The order of `base` (which keeps all caps), run in time under `rule`; keeps all caps as well.

    Why it cannot block: a later F goes first only if the cap holds at every point that it overtakes, when each W is
    counted as run with its I; so whenever the next F of the order has no room, there is a W that makes some.
    """
    return _Squeeze(work, base, rule).run()


class _Squeeze:
    def __init__(self, work: Work, base: IntOrders, rule: Rule) -> None:
        self._work, self._rule = work, rule
        self._forward = [action.op is Op.F for action in work.actions]
        self._todo = [[n for n in order if work.actions[n].op is not Op.W] for order in base]
        self._weights: list[deque[int]] = [deque() for _ in base]
        self._pending = [0.0] * len(base)  # what those W hold
        self._held = [0.0] * len(base)
        self._free_at = [0.0] * len(base)
        self._missing = [len(needs) for needs in work.needs]  # of what each waits for has not ended
        self._arrival = [0.0 if missing == 0 else math.inf for missing in self._missing]
        self._latest = [0.0] * len(work.actions)  # arrival so far
        self._orders: IntOrders = [[] for _ in base]

    def run(self) -> IntOrders:
        work = self._work
        wakes = [(0.0, rank) for rank in range(len(self._todo))]  # when a rank has something new to decide
        left = len(work.actions)
        while left:
            now, rank = heapq.heappop(wakes)
            while wakes and wakes[0] == (now, rank):
                heapq.heappop(wakes)
            if self._free_at[rank] > now or (n := self._choose(rank, now)) is None:
                continue
            end = self._start(rank, n, now)
            left -= 1
            heapq.heappush(wakes, (end, rank))
            for user, lag in work.users[n]:
                if work.rank[user] != rank:
                    heapq.heappush(wakes, (end + lag, work.rank[user]))
        return self._orders

    def _start(self, rank: int, n: int, now: float) -> float:
        work = self._work
        self._held[rank] += work.takes[n] - work.frees[n]
        self._orders[rank].append(n)
        weight = work.weight_of[n]
        if weight >= 0:
            self._weights[rank].append(weight)
            self._pending[rank] += work.frees[weight]
        if self._weights[rank] and self._weights[rank][0] == n:
            self._weights[rank].popleft()
            self._pending[rank] -= work.frees[n]
        else:
            self._todo[rank].remove(n)
        end = self._free_at[rank] = now + work.seconds[n]
        for user, lag in work.users[n]:
            self._latest[user] = max(self._latest[user], end + lag)
            self._missing[user] -= 1
            if not self._missing[user]:
                self._arrival[user] = self._latest[user]
        return end

    def _choose(self, rank: int, now: float) -> int | None:
        work, rule, todo, weights = self._work, self._rule, self._todo[rank], self._weights[rank]
        if not todo:
            return weights[0] if weights else None
        held, cap, head = self._held[rank], work.caps[rank], todo[0]
        arrivals, forward = self._arrival, self._forward
        arrival = arrivals[head]
        if arrival <= now and not (forward[head] and rule.backwards_first):
            return weights[0] if weights and held + work.takes[head] > cap else head
        planned = highest = held - self._pending[rank]
        later: int | None = None
        for place, n in enumerate(todo[: rule.horizon]):
            takes = work.takes[n]
            if place and arrivals[n] <= now:
                if not forward[n]:
                    if arrival <= now or self._worth(n, now, arrival):
                        return n
                elif later is None and max(highest, held) + takes <= cap and self._worth(n, now, arrival):
                    later = n
            planned += takes
            highest = max(highest, planned)
            if not forward[n]:
                planned -= work.frees[n] + work.frees[work.weight_of[n]]
        if arrival <= now:
            return weights[0] if weights and held + work.takes[head] > cap else head
        weight = weights[0] if weights and self._worth(weights[0], now, arrival) else None
        choices = (weight, later) if rule.weights_first else (later, weight)
        return next((n for n in choices if n is not None), None)

    def _worth(self, n: int, now: float, arrival: float) -> bool:
        """Whether `n` may start although the next of the order arrives at `arrival`."""
        return now + self._work.seconds[n] * (1 - self._rule.stretch) <= arrival
