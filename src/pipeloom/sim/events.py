"""Event-driven simulation of a schedule or program, with links that transfer one message at a time."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.ir.action import COMPUTE_OPS, RECEIVES, SENDS, SKIP_OPS, Action, Op
from pipeloom.ir.schedule import Program, Schedule, awaited, message_after, peer_of
from pipeloom.ir.walk import in_background, meets, walk
from pipeloom.sim.background import Background
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network, Pair
from pipeloom.sim.spans import Span

OWN_LINK = -1


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


class _Result(NamedTuple):
    """A result: computed on `rank`, available at `at`; the receiver is busy for `taking` seconds."""

    rank: int
    at: float
    taking: float = 0.0


class EventRun:
    """The state of all ranks.

    Attributes:
        spans: of each rank.
        background: the links of data-parallel replicas and of offloading, with their spans.
        waits: for each rank, the seconds that computations waited inside.
        transfers: messages over links with a bandwidth.
    """

    def __init__(self, pipeline: Schedule | Program, costs: Costs, network: Network) -> None:
        self.pipeline, self.network = pipeline, network
        self.schedule = schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
        self.orders: Sequence[Sequence[Action]] = [tuple(order) for order in pipeline.orders]
        self.seconds, self.overlap = costs.seconds(schedule), costs.overlap
        self.factors = costs.factors(schedule)
        self.slowness = costs.slowness(schedule) or (1.0,) * schedule.num_ranks
        self.latency = network.latency(schedule.num_ranks)
        self.bytes_sent = costs.bytes_sent(schedule) if network.limited else None
        skips = pipeline.skips if isinstance(pipeline, Program) and network.limited else ()
        self.skip_bytes = costs.bytes_of_skips(skips)
        self.shared = network.shared_links(schedule.num_ranks)
        # Of each stage whose gradients are summed over several ranks, its group and those ranks.
        self.meetings: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        if isinstance(pipeline, Program):
            groups = {group: pipeline.ranks_of_group(group) for group in pipeline.gradient_groups}
            self.meetings = {stage: found for found in groups.items() for stage in found[0]}
        self.background = Background(pipeline, costs, network)
        self.arrived: dict[tuple[int, ...], int] = {}
        self.position = [0] * len(self.orders)
        self.clock = [0.0] * len(self.orders)
        self.running: list[tuple[Span, ...]] = [()] * len(self.orders)
        self.spans: list[list[Span]] = [[] for _ in self.orders]
        self.waits = [0.0] * len(self.orders)  # inside computations
        self.results: dict[Action, _Result] = {}
        self.waiting: dict[Action, list[int]] = {}
        self.moments: list[tuple[float, int]] = []  # ends of what runs: seconds and rank
        self.line_free: dict[object, float] = {}
        self.transfers: list[Transfer] = []

    def begin(self, rank: int) -> None:
        """Start the next action of a rank if its needs are available or in flight; else wait for the missing one."""
        order = self.orders[rank]
        while self.position[rank] < len(order) and in_background(order[self.position[rank]], self.schedule):
            self.background.begin(rank, order[self.position[rank]], self.clock[rank])
            self.position[rank] += 1
        if self.position[rank] == len(order):
            return
        action = order[self.position[rank]]
        free = self.clock[rank]
        ready = max(free, self.background.there(rank, action))
        if action in self.schedule.partners:
            ready = max(ready, self.background.there(rank, self.schedule.partners[action]))
        for need in awaited(action, self.pipeline):
            result = self.results.get(need)
            if result is None:
                self.waiting.setdefault(need, []).append(rank)
                return
            if result.rank != rank:
                ready = max(ready, result.at + self.latency[result.rank][rank]) + result.taking
        self.running[rank] = spans = self._spans(rank, action, free, ready)
        heapq.heappush(self.moments, (spans[-1].end, rank))

    def _spans(self, rank: int, action: Action, free: float, ready: float) -> tuple[Span, ...]:
        """The spans of the rank's next action if the rank is free at `free` and the needs are available at `ready`."""
        stage, op = action.stage, action.op
        if op in SENDS:
            return (Span(action, ready, ready + self.network.send_seconds),)
        if op in RECEIVES:
            return (Span(action, free, ready + self.network.receive_seconds),)
        if meets(action) and stage in self.meetings:
            return (Span(action, ready, ready),)
        seconds = self._computing(action, rank)
        partner = self.schedule.partners.get(action) if self.schedule.overlapped else None
        if partner is None:
            return (self._span(rank, action, ready, seconds),)
        first = self._span(rank, action, ready, self.overlap * seconds)
        return first, self._span(rank, partner, first.end, self.overlap * self._computing(partner, rank))

    def _span(self, rank: int, action: Action, start: float, seconds: float) -> Span:
        if not self.background.inside or action.op not in COMPUTE_OPS:
            return Span(action, start, start + seconds)
        end, waited = self.background.compute(rank, action, start, seconds)
        self.waits[rank] += waited
        return Span(action, start, end)

    def _computing(self, action: Action, rank: int) -> float:
        seconds = self.seconds[action.op][action.stage]
        if self.factors and action.op in self.factors:
            seconds *= self.factors[action.op][action.slice or 0]
        return seconds * self.slowness[rank] if action.op in COMPUTE_OPS else seconds

    def finish(self, now: float, rank: int) -> None:
        """End a rank's running actions: publish results and start the actions that waited for them or for the rank."""
        spans, self.running[rank] = self.running[rank], ()
        action = spans[0].action
        if meets(action) and action.stage in self.meetings:
            self._meet(rank, spans)
            return
        self.clock[rank] = now
        woken: list[int] = []
        result = _Result(rank, now)
        for span in spans:
            self.results[span.action] = result if self.bytes_sent is None else self._publish(span.action, rank, now)
            if span.action in self.waiting:
                woken += self.waiting.pop(span.action)
        if spans[-1].end < self.clock[rank] and action.op in SENDS:
            spans = (spans[0]._replace(end=self.clock[rank]),)
        self.spans[rank] += spans
        self.position[rank] += len(spans)
        for other in woken:
            self.begin(other)
        self.begin(rank)

    def _meet(self, rank: int, spans: tuple[Span, ...]) -> None:
        """A rank has its gradients; once all of its group have, they are summed, and each starts its next action."""
        action = spans[0].action
        group, members = self.meetings[action.stage]
        self.arrived[group] = self.arrived.get(group, 0) + 1
        self.running[rank] = spans
        if self.arrived[group] < len(members):
            return
        self.arrived[group] = 0
        came = {member: self.running[member][0] for member in members}
        for member, span in came.items():  # each waits for what the others sent when they came
            there = (each.start + self.latency[other][member] * (other != member) for other, each in came.items())
            self.clock[member] = max(there) + self.seconds[action.op][action.stage]
            self.spans[member].append(span._replace(end=self.clock[member]))
            self.position[member] += 1
            self.begin(member)

    def _publish(self, action: Action, rank: int, now: float) -> _Result:
        """Send the action's result; without overlap the sender is busy until the end of the transfer."""
        assert self.bytes_sent is not None
        send = action if action.op in SENDS else None if self.pipeline.lowered else message_after(action, self.schedule)
        if send is None:
            return _Result(rank, now)
        pair: Pair = (rank, peer_of(send, self.schedule.placement))
        link = self.shared.get(pair, OWN_LINK)
        bandwidth = self.network.bytes_per_second if link == OWN_LINK else self.network.links[link].bytes_per_second
        if bandwidth is None:
            return _Result(rank, now)
        there, back = self.bytes_sent
        if send.op in SKIP_OPS:
            size = self.skip_bytes[min(send.stage, send.other_stage), max(send.stage, send.other_stage)]
        else:
            size = there[send.stage] if send.op is Op.SEND_F else back[send.stage - 1]
        blocking = not self.network.overlap_communication
        ready = self.clock[rank]  # after its earlier messages, where they keep it busy
        transfer = Transfer(send, *pair, link, ready, ready, ready, blocking)
        start = max(ready, self.line_free.get(transfer.line, 0.0))
        end = start + size / bandwidth
        self.transfers.append(transfer._replace(start=start, end=end))
        self.line_free[transfer.line] = end
        if not blocking:
            return _Result(rank, end)
        self.clock[rank] = end
        return _Result(rank, start, end - start)


def spans_by_events(pipeline: Schedule | Program, costs: Costs, network: Network) -> EventRun:
    """Run each action as early as possible. Raises ScheduleError for a deadlock."""
    run = EventRun(pipeline, costs, network)
    for rank in range(len(run.orders)):
        run.begin(rank)
    while run.moments:
        now, rank = heapq.heappop(run.moments)
        run.finish(now, rank)
    if any(position < len(order) for position, order in zip(run.position, run.orders, strict=True)):
        for _ in walk(pipeline):  # says who waits for whom
            pass
        raise AssertionError("a walk found an order of actions that the simulation did not")
    return run
