"""The search's view of a step: every F, I and W as a number, with its rank, time, memory and predecessors."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, dependencies
from pipeloom.ir.walk import walk
from pipeloom.schedules.conditions import Conditions

IntOrders = list[list[int]]  # for each rank, action numbers in order

_TOLERANCE = 1e-9  # of sums of memory and of times


class Work:
    """All actions of one step, numbered in an order that respects their dependencies, F and I by micro-batch first.

    Attributes:
        actions: by number.
        rank, seconds, takes, frees: of each action; memory is taken when it starts and freed when it ends.
        needs: for each action, ``(number, lag in seconds)`` of what it waits for, beside its rank.
        users: the same the other way round.
        weight_of: for each I, the number of its W; -1 for the others.
    """

    def __init__(self, placement: Placement, num_microbatches: int, conditions: Conditions) -> None:
        self.placement, self.num_microbatches, self.conditions = placement, num_microbatches, conditions
        stages = range(placement.num_stages)
        microbatches = range(num_microbatches)
        self.actions = [
            action
            for b in microbatches
            for action in (
                *(Action(s, Op.F, b) for s in stages),
                *(Action(s, op, b) for s in reversed(stages) for op in (Op.I, Op.W)),
            )
        ]
        self.number = {action: n for n, action in enumerate(self.actions)}
        self.rank = [placement.rank_of(a.stage, a.microbatch or 0) for a in self.actions]
        times = {Op.F: conditions.forward, Op.I: conditions.backward_input, Op.W: conditions.backward_weight}
        self.seconds = [times[a.op][a.stage] for a in self.actions]
        kept, left = conditions.activation, conditions.weight_gradient
        self.takes = [kept[a.stage] if a.op is Op.F else 0.0 for a in self.actions]
        self.frees = [{Op.F: 0.0, Op.I: kept[a.stage] - left[a.stage], Op.W: left[a.stage]}[a.op] for a in self.actions]
        self.caps = [cap + _TOLERANCE * (cap if math.isfinite(cap) else 0.0) for cap in conditions.caps]
        self.needs: list[list[tuple[int, float]]] = []
        self.users: list[list[tuple[int, float]]] = [[] for _ in self.actions]
        plan = self.schedule("plan", self.one_by_one())
        for n, action in enumerate(self.actions):
            needs = []
            for need in dependencies(action, plan):
                other = self.number[need]
                source, target = self.rank[other], self.rank[n]
                lag = conditions.latency[source][target] if source != target else 0.0
                needs.append((other, lag))
                self.users[other].append((n, lag))
            self.needs.append(needs)
        self.weight_of = [self.number[a.with_op(Op.W)] if a.op is Op.I else -1 for a in self.actions]

    def one_by_one(self) -> IntOrders:
        """Each micro-batch down and up before the next: holds the least that any order can."""
        orders: IntOrders = [[] for _ in range(self.placement.num_ranks)]
        for n, rank in enumerate(self.rank):
            orders[rank].append(n)
        return orders

    def orders_of(self, schedule: Schedule) -> IntOrders:
        """A schedule's orders in numbers; each B becomes I and W, which never takes longer."""
        return [
            [
                self.number[action.with_op(op)]
                for action in order
                for op in ((Op.I, Op.W) if action.op is Op.B else (action.op,))
            ]
            for order in schedule.orders
        ]

    def schedule(self, name: str, orders: IntOrders) -> Schedule:
        """The inverse of `orders_of`."""
        return Schedule(
            name=name,
            num_microbatches=self.num_microbatches,
            placement=self.placement,
            orders=tuple(tuple(self.actions[n] for n in order) for order in orders),
        )

    def fits(self, rank: int, order: Iterable[int]) -> bool:
        """Whether the rank's cap holds in this order."""
        held, cap = 0.0, self.caps[rank]
        for n in order:
            held += self.takes[n]
            if held > cap:
                return False
            held -= self.frees[n]
        return True

    def all_fit(self, orders: IntOrders) -> bool:
        return all(self.fits(rank, order) for rank, order in enumerate(orders))

    def ends(self, orders: IntOrders) -> list[float] | None:
        """When each action ends if all start as early as they can; None if some wait in a circle."""
        seconds, needs = self.seconds, self.needs
        ended = [-1.0] * len(self.actions)
        position = [0] * len(orders)
        clocks = [0.0] * len(orders)
        waiting: dict[int, list[int]] = {}
        ready = list(range(len(orders)))
        left = len(self.actions)
        while ready:
            rank = ready.pop()
            order, clock = orders[rank], clocks[rank]
            at, size = position[rank], len(order)
            while at < size:
                n = order[at]
                for need, lag in needs[n]:
                    end = ended[need]
                    if end < 0.0:
                        waiting.setdefault(need, []).append(rank)
                        break
                    if end + lag > clock:
                        clock = end + lag
                else:
                    clock += seconds[n]
                    ended[n] = clock
                    at += 1
                    left -= 1
                    if n in waiting:
                        ready.extend(waiting.pop(n))
                    continue
                break
            position[rank], clocks[rank] = at, ended[order[at - 1]] if at else 0.0
        return ended if left == 0 else None

    def makespan(self, orders: IntOrders) -> float:
        """Seconds of the step; infinity if the orders deadlock."""
        ended = self.ends(orders)
        return math.inf if ended is None else max(ended, default=0.0)

    def makespan_of(self, schedule: Schedule) -> float:
        """Seconds of a schedule as it is, its full backwards and overlapped pairs included."""
        conditions, place = self.conditions, self.placement.rank_of
        forward, backward_input, weight = conditions.forward, conditions.backward_input, conditions.backward_weight
        full = tuple(map(sum, zip(backward_input, weight, strict=True)))
        seconds = {Op.F: forward, Op.B: full, Op.I: backward_input, Op.W: weight}
        clock = [0.0] * self.placement.num_ranks
        ended: dict[Action, float] = {}
        for rank, action, needs in walk(schedule):
            for need in needs:
                source = place(need.stage, need.microbatch or 0)
                lag = conditions.latency[source][rank] if source != rank else 0.0
                clock[rank] = max(clock[rank], ended[need] + lag)
            clock[rank] += seconds[action.op][action.stage]
            partner = schedule.partners.get(action)
            ended[action] = clock[rank] + (seconds[partner.op][partner.stage] if partner else 0.0)
        return max(clock)

    def lower_bound(self) -> float:
        """No order that keeps the caps is shorter.

        Two bounds of every rank: Jackson's preemptive one, with heads and tails from the dependencies; and what the
        rank holds over time: an activation lives at least as long as its micro-batch is on its way to the end and back.
        """
        heads = [0.0] * len(self.actions)
        for n, needs in enumerate(self.needs):
            heads[n] = max((heads[need] + self.seconds[need] + lag for need, lag in needs), default=0.0)
        tails = [0.0] * len(self.actions)
        for n in reversed(range(len(self.actions))):
            tails[n] = max((tails[user] + self.seconds[user] + lag for user, lag in self.users[n]), default=0.0)
        bound = max((h + s + t for h, s, t in zip(heads, self.seconds, tails, strict=True)), default=0.0)
        for rank in range(self.placement.num_ranks):
            jobs = [(heads[n], tails[n], self.seconds[n]) for n, where in enumerate(self.rank) if where == rank]
            bound = max(bound, _preemptive(jobs), self._memory_bound(rank, heads, tails))
        return bound

    def _memory_bound(self, rank: int, heads: list[float], tails: list[float]) -> float:
        """Seconds for which the rank's cap makes its micro-batches wait for each other, heads and tails added."""
        cap, total = self.caps[rank], 0.0
        first, bound = math.inf, 0.0
        count: dict[int, int] = {}  # of the micro-batches of each stage so far
        for n, action in enumerate(self.actions):
            if self.rank[n] != rank or action.op is not Op.F:
                continue
            backward = self.number[action.with_op(Op.I)]
            weight = self.weight_of[backward]
            life = heads[backward] + self.seconds[backward] - heads[n]
            total += self.takes[n] * life + self.frees[weight] * self.seconds[weight]
            first = min(first, heads[n])
            count[action.stage] = count.get(action.stage, 0) + 1
            rest = max(tails[backward], self.seconds[weight])
            slots = int(cap / self.takes[n]) if self.takes[n] and math.isfinite(cap) else self.num_microbatches
            rounds = -(-count[action.stage] // max(1, slots))
            bound = max(bound, heads[n] + rounds * life + rest)
        return max(bound, first + total / cap) if total and math.isfinite(cap) else bound


def _preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Of (head, tail, seconds): the makespan of one machine that always runs the ready job with the longest tail."""
    coming = sorted(jobs)
    ready: list[list[float]] = []  # [-tail, seconds left]
    now = makespan = 0.0
    index = 0
    while index < len(coming) or ready:
        if not ready:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            heapq.heappush(ready, [-coming[index][1], coming[index][2]])
            index += 1
        job = ready[0]
        until = coming[index][0] if index < len(coming) else math.inf
        if now + job[1] <= until:
            now += job[1]
            makespan = max(makespan, now - job[0])
            heapq.heappop(ready)
        else:
            job[1] -= until - now
            now = until
    return makespan
