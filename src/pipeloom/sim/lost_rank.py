"""A step of data-parallel replicas without one rank, whose micro-batches its peers in other replicas compute.

    replica 0    rank 0   0F0 0F1 .......            replica 0   0F0 0F1 ......
                 rank 1       1F0 1B0 1F1 ..                         1F0 1F0' 1B0 1B0' 1F1 ..
    replica 1    rank 0   0F0 0F1 .......            replica 1   0F0'0F1' .....
                 rank 1       1F0 1B0 1F1 ..                     lost

The peers hold the same parameters, so they need nothing but the messages of the lost rank's neighbours: ReCycle
(arXiv:2405.14009, adaptive pipelining and decoupled back-propagation). Times of messages are those without queues on
links; gradient sums over replicas are left out.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Schedule, dependencies
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network
from pipeloom.sim.simulator import simulate
from pipeloom.sim.spans import Span

_Place = tuple[int, int]  # replica and rank
_Done = tuple[int, Action]  # replica of the micro-batch, and a computation


class _Task(NamedTuple):
    """A computation, or an overlapped pair, of one micro-batch's replica.

    Attributes:
        key: when it starts in a step without losses, its place on the rank, and its replica: the fixed order.
        actions: one, or two that run as one unit.
        seconds: it takes.
    """

    key: tuple[float, int, int]
    actions: tuple[Action, ...]
    seconds: float

    @property
    def replica(self) -> int:
        """The replica whose micro-batch it is."""
        return self.key[2]

    @property
    def kept(self) -> int:
        """How many more stages have live activations after it."""
        return sum({Op.F: 1, Op.B: -1, Op.W: -1}.get(action.op, 0) for action in self.actions)


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A simulated step without one rank.

    Attributes:
        seconds: of the step.
        whole_seconds: of a step with all ranks.
        moved_seconds: computations that each peer has in addition.
        peak_activations: the most live activations of a peer, in shares of a rank.
        whole_peak_activations: the same with all ranks.
    """

    seconds: float
    whole_seconds: float
    moved_seconds: float
    peak_activations: float
    whole_peak_activations: float

    @property
    def in_bubbles(self) -> float:
        """The fraction of the moved computations that does not lengthen the step."""
        if not self.moved_seconds:
            return 1.0
        return min(1.0, max(0.0, 1 - (self.seconds - self.whole_seconds) / self.moved_seconds))


def simulate_rerouted(
    schedule: Schedule,
    costs: Costs,
    network: Network | None = None,
    *,
    data: int,
    lost: tuple[int, int],
    split: bool = False,
) -> Rerouted:
    """Simulate a step in which the peers of a lost rank compute its micro-batches, in turn.

    Each rank runs its computations in the order of their starts in a step without losses or, if that is faster, the
    first of those that are ready. It then holds no more activations than in the fixed order.

    Args:
        schedule: of each replica; synchronous.
        costs, network: see `simulate`.
        data: number of replicas, at least 2.
        lost: rank and replica.
        split: whether backwards run as I and, where nothing else is ready, W, also where the schedule does not split
            them.

    Raises:
        InputError: there is no peer or no such rank, or the schedule is asynchronous or has no backwards.
    """
    network = network or Network()
    _check(schedule, data, lost)
    whole = simulate(schedule, costs, network)
    step = _Step(_split(schedule) if split else schedule, costs, network, data, lost)
    found = [_Run(step, ready_first=ready_first).finish() for ready_first in (False, True)]
    seconds, peak = min(each for each in found if each is not None)
    return Rerouted(
        seconds=seconds,
        whole_seconds=whole.makespan,
        moved_seconds=step.moved_seconds / (data - 1),
        peak_activations=peak * schedule.stage_share / schedule.num_slices,
        whole_peak_activations=whole.peak_activations[lost[0]],
    )


def _check(schedule: Schedule, data: int, lost: tuple[int, int]) -> None:
    rank, replica = lost
    if data < 2:
        raise InputError(f"{data} replica: a lost rank has no peer in another one. Use 2 or more.")
    if not (0 <= rank < schedule.num_ranks and 0 <= replica < data):
        raise InputError(
            f"rank {rank} of replica {replica}: ranks are 0..{schedule.num_ranks - 1}, replicas 0..{data - 1}."
        )
    if schedule.microbatches_per_update is not None or schedule.forward_only:
        raise InputError(
            f"schedule {schedule.name!r}: micro-batches of a lost rank are moved in synchronous training steps only. "
            "Use a schedule such as 1f1b."
        )


def _split(schedule: Schedule) -> Schedule:
    """The schedule with each backward as I and W."""
    orders = tuple(tuple(part for action in order for part in _parts(action)) for order in schedule.orders)
    overlapped = frozenset((first, _parts(second)[0]) for first, second in schedule.overlapped)
    return replace(schedule, orders=orders, overlapped=overlapped)


def _parts(action: Action) -> tuple[Action, ...]:
    return (action._replace(op=Op.I), action._replace(op=Op.W)) if action.op is Op.B else (action,)


class _Step:
    """The tasks of all ranks, and what they need.

    Attributes:
        tasks: of each rank in the fixed order.
        places: where each computation runs.
        moved_seconds: computations of the lost rank.
        peers: ranks that compute these.
    """

    def __init__(self, schedule: Schedule, costs: Costs, network: Network, data: int, lost: tuple[int, int]) -> None:
        self._schedule, self._lost, self._overlap = schedule, (lost[1], lost[0]), costs.overlap
        self._replicas = [replica for replica in range(data) if replica != lost[1]]
        self._latency = network.message_seconds(schedule, costs)
        self.peers = [(replica, lost[0]) for replica in self._replicas]
        self.tasks: dict[_Place, list[_Task]] = {}
        self.places: dict[_Done, _Place] = {}
        self.moved_seconds = 0.0
        for rank, spans in enumerate(simulate(schedule, costs, network).spans):
            for replica in range(data):
                for task in self._of_rank(spans, replica):
                    place = self._place(replica, rank, task.actions[0])
                    self.tasks.setdefault(place, []).append(task)
                    self.places |= dict.fromkeys(((replica, action) for action in task.actions), place)
                    if (replica, rank) == self._lost:
                        self.moved_seconds += task.seconds
        for tasks in self.tasks.values():
            tasks.sort()

    def _peer(self, action: Action) -> int:
        """The number of the peer to which a computation of the lost rank moves."""
        return (action.microbatch or 0) % len(self._replicas)

    def _place(self, replica: int, rank: int, action: Action) -> _Place:
        if (replica, rank) != self._lost:
            return replica, rank
        return self._replicas[self._peer(action)], rank

    def _of_rank(self, spans: Sequence[Span], replica: int) -> Iterator[_Task]:
        """The tasks of a rank, from its spans in a step without losses."""
        left = list(enumerate(spans))[::-1]
        while left:
            index, (action, start, end) = left.pop()
            partner = self._schedule.partners.get(action)
            if partner is None:
                yield _Task((start, index, replica), (action,), end - start)
                continue
            second, (_, again, last) = left.pop()
            if self._peer(action) == self._peer(partner):
                yield _Task((start, index, replica), (action, partner), last - start)
            else:  # they may run on different peers
                scale = self._overlap or 1.0
                yield _Task((start, index, replica), (action,), (end - start) / scale)
                yield _Task((start, second, replica), (partner,), (last - again) / scale)

    def needs(self, task: _Task) -> list[_Done]:
        """The computations of other tasks that a task waits for."""
        found = {need for action in task.actions for need in dependencies(action, self._schedule)}
        return [(task.replica, need) for need in found - {*task.actions}]

    def message_seconds(self, source: _Place, target: _Place) -> float:
        """From the end of a computation until another rank has its result."""
        return 0.0 if source == target else self._latency[source[1]][target[1]]


class _Run:
    """One way through the tasks.

    Args:
        step: the tasks.
        ready_first: whether a rank runs the first task that is ready, and not the first one.
    """

    def __init__(self, step: _Step, *, ready_first: bool) -> None:
        self._step, self._ready_first = step, ready_first
        self._limits = {place: _peak(tasks) for place, tasks in step.tasks.items()}
        self._ready: dict[_Place, list[tuple[bool, _Task]]] = {place: [] for place in step.tasks}
        self._position, self._live = dict.fromkeys(step.tasks, 0), dict.fromkeys(step.tasks, 0)
        self._peaks = dict(self._live)
        self._idle = set(step.tasks)
        self._missing: dict[_Task, int] = {}
        self._from: dict[_Task, float] = {}  # when a task has all that it needs
        self._waiting: dict[_Done, list[tuple[_Place, _Task]]] = {}
        self._events: list[tuple[float, bool, _Place, _Task]] = []  # a task ends, or may start

    def finish(self) -> tuple[float, int] | None:
        """Seconds of the step, and the most live stages of a peer; None: ranks wait for each other."""
        for place, tasks in self._step.tasks.items():
            for task in tasks:
                needs = self._step.needs(task)
                self._missing[task], self._from[task] = len(needs), 0.0
                for need in needs:
                    self._waiting.setdefault(need, []).append((place, task))
                if not needs:
                    heapq.heappush(self._events, (0.0, False, place, task))
        now, done = 0.0, 0
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                _, ends, place, task = heapq.heappop(self._events)
                if ends:
                    done += 1
                    self._end(now, place, task)
                else:
                    heapq.heappush(self._ready[place], (task.actions[0].op is Op.W and self._ready_first, task))
            for place in sorted(self._idle):
                self._start(now, place)
        if done < len(self._missing):
            return None
        return now, max(self._peaks[peer] for peer in self._step.peers)

    def _end(self, now: float, place: _Place, task: _Task) -> None:
        self._idle.add(place)
        self._live[place] += task.kept
        for action in task.actions:
            for where, other in self._waiting.get((task.replica, action), ()):
                self._missing[other] -= 1
                self._from[other] = max(self._from[other], now + self._step.message_seconds(place, where))
                if not self._missing[other]:
                    heapq.heappush(self._events, (self._from[other], False, where, other))

    def _start(self, now: float, place: _Place) -> None:
        """Start a task on an idle rank, if one may run."""
        task = self._next(place)
        if task is None:
            return
        self._idle.remove(place)
        self._position[place] += 1
        if task.actions[0].op is Op.F:
            self._peaks[place] = max(self._peaks[place], self._live[place] + 1)
        heapq.heappush(self._events, (now + task.seconds, True, place, task))

    def _next(self, place: _Place) -> _Task | None:
        ready = self._ready[place]
        if not self._ready_first:
            tasks, position = self._step.tasks[place], self._position[place]
            return heapq.heappop(ready)[1] if ready and ready[0][1] is tasks[position] else None
        full = self._live[place] >= self._limits[place]
        fits = [each for each in ready if not (full and each[1].actions[0].op is Op.F)]
        if not fits:
            return None
        best = min(fits)
        ready.remove(best)
        heapq.heapify(ready)
        return best[1]


def _peak(tasks: Sequence[_Task]) -> int:
    """The most live stages of a rank that runs tasks in this order."""
    live = peak = 0
    for task in tasks:
        peak = max(peak, live + (task.actions[0].op is Op.F))
        live += task.kept
    return peak
