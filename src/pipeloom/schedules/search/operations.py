"""The search's representation of a step: numbered F, I and W with rank, time, memory and dependencies."""

import math
from collections.abc import Iterable

from pipeloom.ir import Action, Op, Placement, Schedule, dependencies
from pipeloom.ir.walk import walk
from pipeloom.schedules.conditions import Conditions

IntOrders = list[list[int]]  # for each rank, action numbers in order

_TOLERANCE = 1e-12  # of sums of memory


class Work:
    """All actions of one step, numbered in an order that respects their dependencies, F and I by micro-batch first.

    Attributes:
        actions: by number.
        rank, seconds, takes, frees: of each action; it takes memory at its start and frees memory at its end.
        before, lag: for each action, the action of the neighbouring stage that it waits for (-1 if none), and the
            seconds between the two. The order F, I, W of a stage and micro-batch is implicit.
        after: the inverse of `before`.
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
        self.caps = [cap * (1 + _TOLERANCE) for cap in conditions.caps]
        self.before, self.after = [-1] * len(self.actions), [-1] * len(self.actions)
        self.lag = [0.0] * len(self.actions)
        plan = self.schedule("plan", self.one_by_one())
        for n, action in enumerate(self.actions):
            for need in dependencies(action, plan):
                if need.stage != action.stage:
                    other = self.number[need]
                    source, target = self.rank[other], self.rank[n]
                    self.before[n], self.after[other] = other, n
                    self.lag[n] = conditions.latency[source][target] if source != target else 0.0
        self.replicated = placement.is_replicated

    def one_by_one(self) -> IntOrders:
        """Each micro-batch down and up before the next: the orders with the least memory."""
        orders: IntOrders = [[] for _ in range(self.placement.num_ranks)]
        for n, rank in enumerate(self.rank):
            orders[rank].append(n)
        return orders

    def least_caps(self) -> list[float]:
        """For each rank, peak memory of one micro-batch: the least cap of any order."""
        least = []
        for order in self.one_by_one():
            held = highest = 0.0
            for n in order:
                held += self.takes[n]
                highest = max(highest, held)
                held -= self.frees[n]
            least.append(highest)
        return least

    def orders_of(self, schedule: Schedule) -> IntOrders:
        """A schedule's orders in numbers; each B becomes I and W, which never takes longer.

        If every stage is on one rank, each op of a stage takes the micro-batches in ascending order. They are
        interchangeable, so no action starts later.
        """
        orders = [
            [
                self.number[action.with_op(op)]
                for action in order
                for op in ((Op.I, Op.W) if action.op is Op.B else (action.op,))
            ]
            for order in schedule.orders
        ]
        if self.replicated:
            return orders
        turns = {(s, op): 0 for s in range(self.placement.num_stages) for op in (Op.F, Op.I, Op.W)}
        for order in orders:
            for at, n in enumerate(order):
                stage, op = self.actions[n][:2]
                order[at] = self.number[Action(stage, op, turns[stage, op])]
                turns[stage, op] += 1
        return orders

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

    def ends(self, orders: IntOrders) -> tuple[list[float], list[int]] | None:
        """The earliest end of each action, and all actions in an order that respects the dependencies.

        `orders` have F, I and W of a stage and micro-batch in this order. None for a deadlock.
        """
        seconds, before, lag = self.seconds, self.before, self.lag
        ended = [-1.0] * len(seconds)
        position = [0] * len(orders)
        clocks = [0.0] * len(orders)
        waiting: dict[int, int] = {}
        ready = list(range(len(orders)))
        passed: list[int] = []
        while ready:
            rank = ready.pop()
            order, clock = orders[rank], clocks[rank]
            at = position[rank]
            for n in order[at:] if at else order:
                need = before[n]
                if need >= 0:
                    arrival = ended[need]
                    if arrival < 0.0:
                        waiting[need] = rank
                        break
                    arrival += lag[n]
                    if arrival > clock:
                        clock = arrival
                clock += seconds[n]
                ended[n] = clock
                passed.append(n)
                at += 1
                if n in waiting:
                    ready.append(waiting.pop(n))
            position[rank], clocks[rank] = at, clock
        return (ended, passed) if len(passed) == len(seconds) else None

    def makespan(self, orders: IntOrders) -> float:
        """Seconds of the step; infinity if the orders deadlock."""
        timed = self.ends(orders)
        return math.inf if timed is None else max(timed[0], default=0.0)

    def makespan_of(self, schedule: Schedule) -> float:
        """Seconds of a schedule as it is, its full backwards and overlapped pairs included."""
        conditions, place = self.conditions, self.placement.rank_of
        forward, backward_input, weight = conditions.forward, conditions.backward_input, conditions.backward_weight
        full = tuple(map(sum, zip(backward_input, weight, strict=True)))
        seconds = {Op.F: forward, Op.B: full, Op.I: backward_input, Op.W: weight}
        in_units = {action for unit in schedule.overlapped for action in unit}
        clock = [0.0] * self.placement.num_ranks
        ended: dict[Action, float] = {}
        for rank, action, needs in walk(schedule):
            for need in needs:
                source = place(need.stage, need.microbatch or 0)
                lag = conditions.latency[source][rank] if source != rank else 0.0
                clock[rank] = max(clock[rank], ended[need] + lag)
            part = conditions.overlap if action in in_units else 1.0
            clock[rank] += part * seconds[action.op][action.stage]
            partner = schedule.partners.get(action)
            ended[action] = clock[rank] + (part * seconds[partner.op][partner.stage] if partner else 0.0)
        return max(clock)
