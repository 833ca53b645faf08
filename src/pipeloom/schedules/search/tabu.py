"""Improvement phase of the search: tabu search over moves on the critical path (Nowicki and Smutnicki, 1996).

An action is delayed by the action before it on its own rank or by a value from another rank. Consecutive actions of one
rank on the critical path are a *block*. Only moving an action after the last or before the first of its block can
shorten the step. The makespan after a move is estimated with the unchanged heads and tails of all other actions (Balas
and Vazacopoulos, 1998). The best move that is not tabu is made, even if the step gets longer.
"""

import random
from dataclasses import dataclass, field
from operator import itemgetter

from pipeloom.ir.action import Op
from pipeloom.schedules.search.operations import IntOrders, Work

_REACH = 6  # how far from the end of a block an action may be that moves there
_TRIES = 6  # moves that are made and timed before a step is given up
_PATIENCE = 400  # steps without a new best before going back to it
_NEAR = 1e-9


@dataclass(slots=True)
class _Timed:
    """Orders with their times: for each action its end, its tail, its arrival and the tail behind its successor."""

    orders: IntOrders
    ends: list[float]
    tails: list[float]
    arrivals: list[float]
    behind: list[float]
    makespan: float


_Move = tuple[float, int, int, int]  # estimated makespan; a rank, and from and to which position its action moves


def improve(work: Work, orders: IntOrders, bound: float, steps: int, rng: random.Random) -> tuple[float, IntOrders]:
    """The best makespan and orders found from `orders` in `steps` steps; stops at `bound`, keeps all caps."""
    return _Tabu(work, bound, rng).run(orders, steps)


@dataclass(slots=True)
class _Tabu:
    work: Work
    bound: float
    rng: random.Random
    # The step before which the first may not go before the second.
    until: dict[tuple[int, int], int] = field(default_factory=dict)
    step: int = 0

    def run(self, orders: IntOrders, steps: int) -> tuple[float, IntOrders]:
        best = current = self._timed(orders)
        assert best is not None
        assert current is not None
        found_at = 0
        for self.step in range(steps):
            if best.makespan <= self.bound * (1 + _NEAR):
                break
            if self.step - found_at > _PATIENCE:
                current, found_at = best, self.step
                self.until.clear()
            following = self._next(current, best.makespan)
            if following is None:
                self.until.clear()
                continue
            current = following
            if current.makespan < best.makespan * (1 - _NEAR):
                best, found_at = current, self.step
        return best.makespan, best.orders

    def _timed(self, orders: IntOrders) -> _Timed | None:
        """All times of these orders; None if some actions wait in a circle."""
        work = self.work
        timed = work.ends(orders)
        if timed is None:
            return None
        ends, passed = timed
        seconds, before, after, lag, where = work.seconds, work.before, work.after, work.lag, work.rank
        tails, behind, arrivals = [0.0] * len(ends), [0.0] * len(ends), [0.0] * len(ends)
        last = [0.0] * len(orders)
        for n in reversed(passed):
            user, rank = after[n], where[n]
            tail = last[rank]
            if user >= 0:
                reach = tails[user] + seconds[user] + lag[user]
                behind[n] = reach
                if reach > tail:
                    tail = reach
            tails[n] = tail
            last[rank] = tail + seconds[n]
            need = before[n]
            if need >= 0:
                arrivals[n] = ends[need] + lag[n]
        return _Timed(orders, ends, tails, arrivals, behind, max(ends, default=0.0))

    def _next(self, current: _Timed, best: float) -> _Timed | None:
        """The legal neighbour within the caps with the best estimate; a tabu move only if it is a new best."""
        moves = [
            (estimate * (1 + _NEAR * self.rng.random()), rank, source, target)  # equals in any order
            for estimate, rank, source, target in self._moves(current)
        ]
        moves.sort(key=itemgetter(0))
        tried = 0
        for estimate, rank, source, target in moves:
            order = current.orders[rank]
            n = order[source]
            if source < target:
                swaps = [(n, other) for other in order[source + 1 : target + 1]]
            else:
                swaps = [(other, n) for other in order[target:source]]
            tabu = any(self.until.get((then, first), 0) > self.step for first, then in swaps)
            if tabu and estimate >= best * (1 - _NEAR):
                continue
            changed = list(order)
            changed.insert(target, changed.pop(source))
            if not self.work.fits(rank, changed):
                continue
            orders = list(current.orders)
            orders[rank] = changed
            following = self._timed(orders)
            if following is not None:  # the reverse of the move is tabu for a while
                self.until.update(dict.fromkeys(swaps, self.step + self.rng.randint(12, 30)))
                return following
            tried += 1
            if tried == _TRIES:
                break
        return None

    def _moves(self, current: _Timed) -> list[_Move]:
        moves = []
        for rank, first, last in self._blocks(current):
            order = current.orders[rank]
            ways = [(source, last) for source in range(max(first, last - _REACH), last)]
            if last > first + 1:  # of two actions, the same swap is there already
                ways += [(source, first) for source in range(first + 1, min(last, first + _REACH) + 1)]
            for source, end in ways:
                target = self._farthest(order, source, end)
                if target != source:
                    moves.append((self._estimate(current, order, source, target), rank, source, target))
        return moves

    def _blocks(self, current: _Timed) -> list[tuple[int, int, int]]:
        """``(rank, first, last)`` positions of the runs that a longest chain takes through the ranks, last to first."""
        work, ends, orders = self.work, current.ends, current.orders
        position = {n: at for order in orders for at, n in enumerate(order)}
        n = max((order[-1] for order in orders if order), key=lambda last: ends[last])
        blocks, near = [], _NEAR * current.makespan
        while True:
            rank = work.rank[n]
            order = orders[rank]
            last = at = position[n]
            start = ends[n] - work.seconds[n]
            while at and ends[order[at - 1]] >= start - near:
                need = work.before[order[at]]
                meet = need >= 0 and work.rank[need] != rank and current.arrivals[order[at]] >= start - near
                if meet and self.rng.random() < 0.5:
                    break  # of two longest chains, either
                at -= 1
                start = ends[order[at]] - work.seconds[order[at]]
            blocks.append((rank, at, last))
            need = work.before[order[at]]
            if need < 0 or current.arrivals[order[at]] < start - near:
                return blocks
            n = need

    def _farthest(self, order: list[int], source: int, end: int) -> int:
        """How far towards `end` an action can go without overtaking its like, what needs it or what it needs."""
        actions, moved = self.work.actions, order[source]
        stage, op, microbatch, _ = actions[moved]
        step, bound, free = (1, self.work.after, Op.W) if end > source else (-1, self.work.before, Op.F)
        for at in range(source + step, end + step, step):
            other = actions[order[at]]
            if order[at] == bound[moved] or (
                other.stage == stage and (other.op is op or (other.microbatch == microbatch and op is not free))
            ):
                return at - step
        return end

    def _estimate(self, current: _Timed, order: list[int], source: int, target: int) -> float:
        """The longest chain through the actions that change places, if all others stay as they are."""
        seconds, arrivals, behind = self.work.seconds, current.arrivals, current.behind
        if source < target:
            low, moved = source, [*order[source + 1 : target + 1], order[source]]
        else:
            low, moved = target, [order[source], *order[target:source]]
        high = low + len(moved)
        clock = current.ends[order[low - 1]] if low else 0.0
        ends = []
        for n in moved:
            if arrivals[n] > clock:
                clock = arrivals[n]
            clock += seconds[n]
            ends.append(clock)
        tail = current.tails[order[high]] + seconds[order[high]] if high < len(order) else 0.0
        longest = 0.0
        for n, end in zip(reversed(moved), reversed(ends), strict=True):
            if behind[n] > tail:
                tail = behind[n]
            if end + tail > longest:
                longest = end + tail
            tail += seconds[n]
        return longest
