"""Event-driven simulation of a schedule or program, with links that transfer one message at a time."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pipeloom.ir.action import COMPUTE_OPS, RECEIVES, SENDS, SKIP_OPS, Action, Op
from pipeloom.ir.schedule import Program, Schedule, awaited, dependencies, message_after, peer_of
from pipeloom.ir.walk import in_background, meets, walk
from pipeloom.sim.background import Background
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network, Pair
from pipeloom.sim.spans import Span

OWN_LINK = -1
# Looking up a member of an enumeration takes as long as two tuples.
SEND_F, REDUCE_GRAD = Op.SEND_F, Op.REDUCE_GRAD
_IN_BACKGROUND = frozenset({Op.UNSHARD, Op.REDUCE_GRAD, Op.OFFLOAD, Op.RELOAD})  # those that may be
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
        self.factors, self.single = costs.factors(schedule), costs.action_seconds
        self.slowness = costs.slowness(schedule) or (1.0,) * schedule.num_ranks
        self.partners = schedule.partners
        self.latency = network.latency(schedule.num_ranks)
        self.bytes_sent = costs.bytes_sent(schedule) if network.limited else None
        skips = pipeline.skips if isinstance(pipeline, Program) and network.limited else ()
        self.skip_bytes = costs.bytes_of_skips(skips)
        self.shared = network.shared_links(schedule.num_ranks)
        self.lines: dict[Pair, tuple[int, float | None]] = {}  # by source and target, number and bandwidth of the link
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
        """Start the next action of a rank if its needs are available or in flight; else wait for the missing one.

        No other rank waits for a receive: it ends at once, and the next action starts.
        """
        order, results, latency = self.orders[rank], self.results, self.latency
        needs_of = awaited if self.partners else dependencies
        while True:
            at, free = self.position[rank], self.clock[rank]
            while at < len(order) and order[at].op in _IN_BACKGROUND and in_background(order[at], self.schedule):
                self.background.begin(rank, order[at], free)
                at += 1
            self.position[rank] = at
            if at == len(order):
                return
            action, ready = order[at], free
            if action.op in _FROM_LINKS:
                ready = max(ready, self.background.there(rank, action))
                if self.partners and action in self.partners:
                    ready = max(ready, self.background.there(rank, self.partners[action]))
            for need in needs_of(action, self.pipeline):
                result = results.get(need)
                if result is None:
                    self.waiting.setdefault(need, []).append(rank)
                    return
                if result.rank != rank:
                    ready = max(ready, result.at + latency[result.rank][rank]) + result.taking
            if action.op not in RECEIVES:
                self.running[rank] = spans = self._spans(rank, action, ready)
                heappush(self.moments, (spans[-1].end, rank))
                return
            end = ready + self.network.receive_seconds
            self.spans[rank].append(Span(action, free, end))
            results[action] = _Result(rank, end)
            self.clock[rank] = end
            self.position[rank] += 1

    def _spans(self, rank: int, action: Action, ready: float) -> tuple[Span, ...]:
        """The spans of a rank's next action, which is no receive, if it starts at `ready`."""
        op = action.op
        if op in SENDS:
            return (Span(action, ready, ready + self.network.send_seconds),)
        if op is REDUCE_GRAD and meets(action) and action.stage in self.meetings:
            return (Span(action, ready, ready),)
        seconds = self._computing(action, rank)
        partner = self.partners.get(action) if self.partners else None
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
        op = action.op
        if action in self.single:
            return self.single[action]
        seconds = self.seconds[op][action.stage]
        if self.factors and op in self.factors:
            seconds *= self.factors[op][action.slice or 0]
        return seconds * self.slowness[rank] if op in COMPUTE_OPS else seconds

    def finish(self, now: float, rank: int) -> None:
        """End a rank's running actions: publish results and start the actions that waited for them or for the rank."""
        spans, self.running[rank] = self.running[rank], ()
        first = spans[0].action
        if first.op is REDUCE_GRAD and meets(first) and first.stage in self.meetings:
            self._meet(rank, spans)
            return
        self.clock[rank] = now
        woken: list[int] = []
        result = _Result(rank, now)
        for span in spans:
            action = span.action
            sends = self.bytes_sent is not None and (action.op in SENDS or not self.pipeline.lowered)
            self.results[action] = self._publish(action, rank, now) if sends else result
            if action in self.waiting:
                woken += self.waiting.pop(action)
        if first.op in SENDS and spans[-1].end < self.clock[rank]:
            spans = (Span(first, spans[0].start, self.clock[rank]),)
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
        target = peer_of(send, self.schedule.placement)
        if (rank, target) not in self.lines:
            link = self.shared.get((rank, target), OWN_LINK)
            of = self.network if link == OWN_LINK else self.network.links[link]
            self.lines[rank, target] = link, of.bytes_per_second
        link, bandwidth = self.lines[rank, target]
        if bandwidth is None:
            return _Result(rank, now)
        there, back = self.bytes_sent
        if send.op in SKIP_OPS:
            size = self.skip_bytes[min(send.stage, send.other_stage), max(send.stage, send.other_stage)]
        else:
            size = there[send.stage] if send.op is SEND_F else back[send.stage - 1]
        blocking = not self.network.overlap_communication
        ready = self.clock[rank]  # after its earlier messages, where they keep it busy
        line = (rank, target) if link == OWN_LINK else link
        start = max(ready, self.line_free.get(line, 0.0))
        end = start + size / bandwidth
        self.transfers.append(Transfer(send, rank, target, link, ready, start, end, blocking))
        self.line_free[line] = end
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
        now, rank = heappop(run.moments)
        run.finish(now, rank)
    if any(position < len(order) for position, order in zip(run.position, run.orders, strict=True)):
        for _ in walk(pipeline):  # says who waits for whom
            pass
        raise AssertionError("a walk found an order of actions that the simulation did not")
    return run
