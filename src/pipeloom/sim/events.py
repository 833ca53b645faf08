"""Event-driven simulation of a schedule or program, with links that transfer one message at a time."""

from heapq import heappop, heappush
from typing import NamedTuple

from pipeloom.ir.action import COMPUTE_OPS, SENDS, SKIP_OPS, Action, Op
from pipeloom.ir.numbered import (
    ENDS,
    MEETS,
    PAIRED,
    PUBLISHES,
    RECEIVES_RESULT,
    RUNS,
    Message,
    RankActions,
    messages_of,
    numbered,
)
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.walk import walk
from pipeloom.sim.background import Background
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network, Pair
from pipeloom.sim.spans import Span

OWN_LINK = -1
# Looking up a member of an enumeration takes as long as two tuples.
SEND_F, REDUCE_GRAD = Op.SEND_F, Op.REDUCE_GRAD
_FROM_LINKS = frozenset({Op.F, Op.B, Op.I, Op.REDUCE_GRAD})  # what may wait for something on a link in the background


class Transfer(NamedTuple):
    """One message on its link.

    Attributes:
        action: the SEND of the message, also where a schedule has no such action.
        source, target: ranks.
        link: number of the link in `Network.links`; -1 for the pair's own.
        ready: seconds at which it could have been transferred.
        start, end: seconds of the transfer.
        blocking: whether source and target compute nothing in its time.
    """

    action: Action
    source: int
    target: int
    link: int
    ready: float
    start: float
    end: float
    blocking: bool = False

    @property
    def line(self) -> object:
        """The key of its link."""
        return (self.source, self.target) if self.link == OWN_LINK else self.link


_Result = tuple[int, float, float]  # the rank that has it, when, and seconds for which it keeps a receiver busy


class _Rank:
    """The state of one rank.

    Attributes:
        runs: its actions.
        seconds: of each.
        position: of the action that runs, or that comes next.
        clock: when it became free.
        begun: positions below it have begun what comes before them in the background.
        running: start and end of the action that runs; of an overlapped pair, with the time in between.
        starts, ends: seconds of the actions that have ended.
        waited: seconds that computations waited inside.
    """

    __slots__ = ("begun", "clock", "ends", "position", "running", "runs", "seconds", "starts", "waited")

    def __init__(self, runs: RankActions, seconds: list[float]) -> None:
        self.runs, self.seconds = runs, seconds
        self.position = self.begun = 0
        self.clock = self.waited = 0.0
        self.running: tuple[float, ...] = ()
        self.starts: list[float] = []
        self.ends: list[float] = []

    @property
    def computations(self) -> list[tuple[float, float]]:
        """Starts and ends of its computations."""
        rows = zip(self.runs.actions, self.starts, self.ends, strict=False)
        return [(start, end) for (_, op, _, _), start, end in rows if op in COMPUTE_OPS]


class EventRun:
    """The state of all ranks.

    Attributes:
        ranks: by number.
        background: the links of data-parallel replicas and of offloading, with their spans.
    """

    def __init__(self, pipeline: Schedule | Program, costs: Costs, network: Network) -> None:
        self.pipeline, self.network = pipeline, network
        schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
        self._schedule, self._table, self._overlap = schedule, costs.seconds(schedule), costs.overlap
        found = numbered(pipeline)
        slowness = costs.slowness(schedule) or (1.0,) * schedule.num_ranks
        self.ranks = [_Rank(runs, self._seconds(runs, costs, slowness[rank])) for rank, runs in enumerate(found.ranks)]
        self._latency, self._receive_seconds = network.latency(schedule.num_ranks), network.receive_seconds
        self._bytes_sent = costs.bytes_sent(schedule) if network.limited else None
        self._messages = messages_of(pipeline) if network.limited else []
        skips = pipeline.skips if isinstance(pipeline, Program) and network.limited else ()
        self._skip_bytes = costs.bytes_of_skips(skips)
        self._shared = network.shared_links(schedule.num_ranks)
        self._lines: dict[Pair, tuple[int, float | None]] = {}  # by source and target, number and bandwidth of the link
        # Of each stage whose gradients are summed over several ranks, its group and those ranks.
        self._meetings: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        if isinstance(pipeline, Program):
            groups = {group: pipeline.ranks_of_group(group) for group in pipeline.gradient_groups}
            self._meetings = {stage: of for of in groups.items() for stage in of[0]}
        self.background = Background(pipeline, costs, network)
        self._delivers = any(runs.background for runs in found.ranks)
        self._arrived: dict[tuple[int, ...], int] = {}
        self._results: list[_Result | None] = [None] * (found.num_results + 1)
        self._waiting: dict[int, list[int]] = {}  # ranks by the number of the result
        self._moments: list[tuple[float, int]] = []  # ends of what runs: seconds and rank
        self._line_free: dict[object, float] = {}
        self._transfers: list[tuple[Action, int, int, int, float, float, float, bool]] = []

    @property
    def spans(self) -> list[list[Span]]:
        """Of each rank."""
        return [list(map(Span, rank.runs.actions, rank.starts, rank.ends)) for rank in self.ranks]

    @property
    def waits(self) -> list[float]:
        """For each rank, the seconds that computations waited inside."""
        return [rank.waited for rank in self.ranks]

    @property
    def transfers(self) -> list[Transfer]:
        """Messages over links with a bandwidth."""
        return [Transfer(*each) for each in self._transfers]

    def run(self) -> None:
        """Run each action as early as possible. Raises ScheduleError for a deadlock."""
        for rank in range(len(self.ranks)):
            self._begin(rank)
        moments = self._moments
        while moments:
            now, rank = heappop(moments)
            self._finish(now, rank)
        if any(rank.position < len(rank.runs.actions) for rank in self.ranks):
            for _ in walk(self.pipeline):  # says who waits for whom
                pass
            raise AssertionError("a walk found an order of actions that the simulation did not")

    def _seconds(self, runs: RankActions, costs: Costs, slowness: float) -> list[float]:
        """Seconds of each action of a rank, in the background or not overlapped with others."""
        factors, single, of_works = costs.factors(self._schedule), costs.action_seconds, list[float]()
        for stage, op, piece in runs.works:
            seconds = self.network.send_seconds if op in SENDS else self._table[op][stage]
            if factors and op in factors:
                seconds *= factors[op][piece or 0]
            of_works.append(seconds * slowness if op in COMPUTE_OPS else seconds)
        found = [of_works[number] for number in runs.work]
        return [single.get(*pair) for pair in zip(runs.actions, found, strict=True)] if single else found

    def _begin(self, number: int) -> None:
        """Run the next actions of a rank, up to one that awaits a missing result or whose end concerns other ranks.

        No other rank waits for a receive, nor for most computations of a program.
        """
        rank, results, latency, of_links = self.ranks[number], self._results, self._latency, self.background
        actions, kinds, numbers, needs, _, _, background = rank.runs
        all_seconds, starts, ends = rank.seconds, rank.starts, rank.ends
        at, clock, delivers, inside = rank.position, rank.clock, self._delivers, of_links.inside
        while True:
            if at in background and rank.begun <= at:
                for action in background[at]:
                    of_links.begin(number, action, clock)
                rank.begun = at + 1
            kind, ready = kinds[at], clock
            if kind == ENDS:
                break
            if delivers and kind != RECEIVES_RESULT:
                for index in (at, at + 1) if kind == PAIRED else (at,):
                    if actions[index][1] in _FROM_LINKS:
                        ready = of_links.there(number, actions[index], ready)
            for need in needs[at]:
                result = results[need]
                if result is None:
                    self._waiting.setdefault(need, []).append(number)
                    rank.position, rank.clock = at, clock
                    return
                source, when, taking = result
                if source != number:
                    arrival = when + latency[source][number]
                    ready = (arrival if arrival > ready else ready) + taking
            if kind == RUNS:
                start = ready
                clock = self._end(number, at, ready, all_seconds[at]) if inside else ready + all_seconds[at]
            elif kind == RECEIVES_RESULT:
                start, clock = clock, ready + self._receive_seconds
                results[numbers[at]] = number, clock, 0.0
            else:
                rank.running = (
                    (ready, ready + all_seconds[at]) if kind == PUBLISHES else self._running(number, kind, at, ready)
                )
                heappush(self._moments, (rank.running[-1], number))
                break
            starts.append(start)
            ends.append(clock)
            at += 1
        rank.position, rank.clock = at, clock

    def _running(self, number: int, kind: int, at: int, ready: float) -> tuple[float, ...]:
        """The times of a meeting or an overlapped pair that starts at `ready`."""
        seconds = self.ranks[number].seconds
        if kind == MEETS:
            return ready, ready
        middle = self._end(number, at, ready, self._overlap * seconds[at])
        return ready, middle, self._end(number, at + 1, middle, self._overlap * seconds[at + 1])

    def _end(self, number: int, at: int, start: float, seconds: float) -> float:
        """The end of an action that starts at `start`; links in the background may make computations longer."""
        rank = self.ranks[number]
        action = rank.runs.actions[at]
        if not self.background.inside or action.op not in COMPUTE_OPS:
            return start + seconds
        end, waited = self.background.compute(number, action, start, seconds)
        rank.waited += waited
        return end

    def _finish(self, now: float, number: int) -> None:
        """End a rank's running actions: publish results and start the actions that waited for them or for the rank."""
        rank, waiting = self.ranks[number], self._waiting
        at, times = rank.position, rank.running
        kind = rank.runs.kinds[at]
        if kind == MEETS:
            self._meet(number)
            return
        rank.clock = now
        woken: list[int] = []
        messages, count = self._messages[number] if self._messages else None, len(times) - 1
        for index in range(at, at + count):
            message, own = None if messages is None else messages[index], rank.runs.results[index]
            self._results[own] = (number, now, 0.0) if message is None else self._publish(message, number, now)
            if own in waiting:
                woken += waiting.pop(own)
        rank.starts += times[:-1]
        rank.ends += times[1:]
        if now < rank.clock and rank.runs.actions[at][1] in SENDS:
            rank.ends[-1] = rank.clock
        rank.position = at + count
        for other in woken:
            self._begin(other)
        self._begin(number)

    def _meet(self, number: int) -> None:
        """A rank has its gradients; once all of its group have, they are summed, and each starts its next action."""
        rank = self.ranks[number]
        action = rank.runs.actions[rank.position]
        group, members = self._meetings[action.stage]
        self._arrived[group] = self._arrived.get(group, 0) + 1
        if self._arrived[group] < len(members):
            return
        self._arrived[group] = 0
        came = {member: self.ranks[member].running[0] for member in members}
        for member, start in came.items():  # each waits for what the others sent when they came
            there = (at + self._latency[other][member] * (other != member) for other, at in came.items())
            one = self.ranks[member]
            one.clock = max(there) + self._table[action.op][action.stage]
            one.starts.append(start)
            one.ends.append(one.clock)
            one.position += 1
            self._begin(member)

    def _publish(self, message: Message, number: int, now: float) -> _Result:
        """Send the action's result; without overlap the sender is busy until the end of the transfer."""
        assert self._bytes_sent is not None
        send, target = message
        line = self._lines.get((number, target))
        if line is None:
            link = self._shared.get((number, target), OWN_LINK)
            of = self.network if link == OWN_LINK else self.network.links[link]
            line = self._lines[number, target] = link, of.bytes_per_second
        link, bandwidth = line
        if bandwidth is None:
            return number, now, 0.0
        there, back = self._bytes_sent
        if send.op in SKIP_OPS:
            size = self._skip_bytes[min(send.stage, send.other_stage), max(send.stage, send.other_stage)]
        else:
            size = there[send.stage] if send.op is SEND_F else back[send.stage - 1]
        blocking, rank = not self.network.overlap_communication, self.ranks[number]
        ready = rank.clock  # after its earlier messages, where they keep it busy
        key: object = (number, target) if link == OWN_LINK else link
        start = max(ready, self._line_free.get(key, 0.0))
        end = start + size / bandwidth
        self._transfers.append((send, number, target, link, ready, start, end, blocking))
        self._line_free[key] = end
        if not blocking:
            return number, end, 0.0
        rank.clock = end
        return number, start, end - start


def spans_by_events(pipeline: Schedule | Program, costs: Costs, network: Network) -> EventRun:
    """Run each action as early as possible. Raises ScheduleError for a deadlock."""
    run = EventRun(pipeline, costs, network)
    run.run()
    return run
