"""Simulation of a program whose ranks take turns on the cores of one machine.

Every computing rank has the same share of the cores: with n processes that compute on c cores, each advances at the
rate min(1, c / n), and for n > c, where each finds less of its data in caches, `crowding` times slower. Ranks that wait
use no core. Work is therefore measured on one clock that slows down and speeds up with the number of computing ranks,
and each computation ends when that clock has advanced by its seconds.

All-gathers and reductions over replicas, whose threads need cores too, do not overlap with computations here.
"""

import heapq
from collections.abc import Sequence

from pipeloom.ir.action import RECEIVES, SENDS, Action, Op
from pipeloom.ir.schedule import Program, awaited
from pipeloom.sim.background import link_seconds
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network
from pipeloom.sim.simulator import build_timeline
from pipeloom.sim.spans import Span
from pipeloom.sim.timeline import Timeline

_BACKGROUND = (Op.UNSHARD, Op.REDUCE_GRAD)


class _Run:
    """The state of all ranks of one replica; `copies` of each compute the same at the same time."""

    def __init__(
        self, program: Program, costs: Costs, network: Network, cores: float, copies: int, crowding: float
    ) -> None:
        self.program, self.schedule, self.network = program, program.schedule, network
        self.cores, self.copies, self.crowding = cores, copies, crowding
        self.seconds = costs.seconds(self.schedule)
        counts = (1,) * self.schedule.num_stages
        links = link_seconds(program, self.schedule, costs, network, counts)
        self.links = {op: links[op] for op in _BACKGROUND}
        self.latency = network.latency(self.schedule.num_ranks)
        self.sizes = costs.bytes_sent(self.schedule) if network.bytes_per_second is not None else None
        self.orders: Sequence[Sequence[Action]] = program.orders
        self.position = [0] * len(self.orders)
        self.now = self.work = 0.0
        self.computing: list[tuple[float, int]] = []  # ends on the clock of work, and ranks
        self.timed: list[tuple[float, int, int]] = []  # ends in seconds, 0 to try again and 1 for an end, and ranks
        self.since = [0.0] * len(self.orders)  # when each rank became free
        self.started = [0.0] * len(self.orders)
        self.ends: dict[Action, float] = {}
        self.waiting: dict[Action, list[int]] = {}
        self.spans: list[list[Span]] = [[] for _ in self.orders]

    def run(self) -> list[list[Span]]:
        for rank in range(len(self.orders)):
            self.begin(rank)
        while self.computing or self.timed:
            rate = self.rate()
            next_work = self.now + (self.computing[0][0] - self.work) / rate if self.computing else float("inf")
            if self.timed and self.timed[0][0] <= next_work:
                at, ended, rank = heapq.heappop(self.timed)
                self._advance(at, rate)
                if ended:
                    self.finish(rank)
                else:
                    self.begin(rank)
            else:
                end, rank = heapq.heappop(self.computing)
                self.now, self.work = next_work, end
                self.finish(rank)
        return self.spans

    def rate(self) -> float:
        """At which each computing rank advances."""
        computing = self.copies * len(self.computing)
        return 1.0 if computing <= self.cores else self.cores / (computing * self.crowding)

    def _advance(self, at: float, rate: float) -> None:
        self.work += (at - self.now) * rate
        self.now = at

    def begin(self, rank: int) -> None:
        """Start the rank's next action, or wait for what it needs."""
        if self.position[rank] == len(self.orders[rank]):
            return
        action = self.orders[rank][self.position[rank]]
        for need in awaited(action, self.program):
            if need not in self.ends:
                self.waiting.setdefault(need, []).append(rank)
                return
            there = self.ends[need] + self._travel(need, rank)
            if there > self.now:
                heapq.heappush(self.timed, (there, 0, rank))
                return
        self.started[rank] = self.since[rank] if action.op in RECEIVES else self.now
        if action.op in self.links:
            heapq.heappush(self.timed, (self.now + self.links[action.op][action.stage], 1, rank))
            return
        if action.op in SENDS:
            seconds = self.network.send_seconds
        elif action.op in RECEIVES:
            seconds = self.network.receive_seconds
        else:
            seconds = self.seconds[action.op][action.stage]
        heapq.heappush(self.computing, (self.work + seconds, rank))

    def _travel(self, need: Action, rank: int) -> float:
        if need.op not in SENDS or need.microbatch is None:
            return 0.0
        source = self.schedule.placement.rank_of(need.stage, need.microbatch)
        seconds = self.latency[source][rank]
        if self.sizes is not None and self.network.bytes_per_second is not None:
            there, back = self.sizes
            size = there[need.stage] if need.op is Op.SEND_F else back[need.stage - 1]
            seconds += size / self.network.bytes_per_second
        return seconds

    def finish(self, rank: int) -> None:
        """End the rank's action, and start what waited for it."""
        action = self.orders[rank][self.position[rank]]
        self.spans[rank].append(Span(action, self.started[rank], self.now))
        self.ends[action] = self.since[rank] = self.now
        self.position[rank] += 1
        self.begin(rank)
        for other in self.waiting.pop(action, ()):
            self.begin(other)


def simulate_shared(
    program: Program, costs: Costs, network: Network, *, cores: float, copies: int = 1, crowding: float = 1.0
) -> Timeline:
    """The timeline of a step whose processes share `cores`.

    Args:
        program: of a synchronous schedule.
        costs: seconds with a core for each process.
        network: of messages.
        cores: that all processes share.
        copies: processes that do the same as each rank: replicas, and those that share a stage.
        crowding: slowdown while more processes compute than there are cores, beside their shares of the cores.
    """
    run = _Run(program, costs, network, cores, copies, crowding)
    schedule = program.schedule
    return build_timeline(schedule, run.run(), name=program.name, kind="simulated", keeps=costs.bytes_kept(schedule))
