"""Background actions of a rank: all-gathers and gradient reductions of a data axis, and offloading of activations.

Each rank has two links. A link serves one action at a time, in the order in which the rank issues them: the data link
connects the rank to other data-parallel replicas, the memory link to slower memory of its machine. The
rank continues at once. A computation waits until its parameters have been gathered and its activation reloaded. The sum
of shared gradients waits for the reductions of its rank.

If the costs have `units`, each unit of a stage is a separate transfer with its own latency:

    F      computes unit by unit, each once it is gathered; so does B at granularity microbatch, last unit first
    B, W   the last backward before a REDUCE_GRAD starts the reduction of each unit once it is computed

At granularity microbatch a computation gathers one unit ahead. If gradients are sharded, one unit is reduced at a time,
and the next unit's computation waits for that.
"""

from collections import deque
from itertools import repeat

from pipeloom.ir import Action, Op, Program, Schedule
from pipeloom.ir.unit_actions import gathers_inside
from pipeloom.ir.walk import meets
from pipeloom.sim.costs import Costs, no_bytes
from pipeloom.sim.data_link import gather_seconds, reduce_seconds
from pipeloom.sim.network import Network
from pipeloom.sim.spans import Span

LINKS = {Op.UNSHARD: "data", Op.REDUCE_GRAD: "data", Op.OFFLOAD: "memory", Op.RELOAD: "memory"}
_READS_PARAMETERS = frozenset({Op.F, Op.B, Op.I})
_WAITS_FOR_ACTIVATION = frozenset({Op.B, Op.I})
# Looking up a member of an enumeration takes as long as two tuples.
F, REDUCE_GRAD, OFFLOAD, RELOAD = Op.F, Op.REDUCE_GRAD, Op.OFFLOAD, Op.RELOAD


class Background:
    """The data and memory links of all ranks while a program is simulated.

    Attributes:
        inside: whether links make computations longer.
        quiet: for each rank, when the transfers on its data link have ended. A computation that starts later waits for
            nothing but its activation.
    """

    def __init__(self, pipeline: Schedule | Program, costs: Costs, network: Network) -> None:
        schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
        data = pipeline.data if isinstance(pipeline, Program) else None
        counts = costs.unit_counts(schedule) if data is not None else None
        self._rows: list[list[tuple[Action, float, float]]] = [[] for _ in pipeline.orders]
        self.quiet = [0.0] * len(pipeline.orders)
        self._memory_free = [0.0] * len(pipeline.orders)
        self._in_units = counts is not None
        self._counts = counts or (1,) * schedule.num_stages
        self._seconds = link_seconds(pipeline, schedule, costs, network, self._counts)  # of one unit
        self._slowdown = network.data_slowdown if data is not None else 0.0
        self.inside = self._in_units or self._slowdown > 0
        self._one_by_one = data is not None and gathers_inside(data)
        self._one_reduction = data is not None and data.strategy.shards_optimizer
        reductions = pipeline.data_reductions if isinstance(pipeline, Program) and self._in_units else frozenset()
        self._last_backwards = frozenset(a.with_op(op) for a in reductions for op in (Op.B, Op.W))
        self._reduced: dict[int, float] = {}  # of a rank, the end of its last reduction
        self._gathered: dict[tuple[int, int], list[float]] = {}  # of rank and stage, when each unit was gathered
        self._back: dict[tuple[int, int | None, int | None], float] = {}  # ends of RELOADs
        self._busy: list[deque[tuple[float, float]]] = [deque() for _ in pipeline.orders]  # of data links, pending

    @property
    def spans(self) -> list[list[Span]]:
        """For each rank, the transfers on its links, one per unit if stages have units."""
        return [[Span(*each) for each in row] for row in self._rows]

    @property
    def transfers(self) -> list[list[tuple[float, float]]]:
        """Starts and ends of the transfers on each link of each rank."""
        return [
            [(start, end) for action, start, end in row if LINKS[action.op] == link]
            for row in self._rows
            for link in ("data", "memory")
        ]

    @property
    def ends(self) -> list[float]:
        """When the last transfers of the ranks end."""
        return [end for row in self._rows for _, _, end in row]

    def begin(self, rank: int, action: Action, now: float) -> None:
        """Issue a background action at `now`; the rank continues at once."""
        stage, op, microbatch, piece = action
        if op is OFFLOAD or op is RELOAD:
            start = max(now, self._memory_free[rank])
            self._memory_free[rank] = end = start + self._seconds[op][stage]
            self._rows[rank].append((action, start, end))
            if op is RELOAD:
                self._back[stage, microbatch, piece] = end
        elif op is Op.UNSHARD:
            count = 1 if self._one_by_one else self._counts[stage]
            self._gathered[rank, stage] = [self._transfer(rank, action, now) for _ in range(count)]
        elif not self._in_units:  # else backwards have started it
            self._transfer(rank, action, now)

    def _transfer(self, rank: int, action: Action, now: float) -> float:
        """Put one transfer on the data link and return its end."""
        start = max(now, self.quiet[rank])
        self.quiet[rank] = end = start + self._seconds[action.op][action.stage]
        self._rows[rank].append((action, start, end))
        if self._slowdown:
            self._busy[rank].append((start, end))
        return end

    def there(self, rank: int, action: Action, ready: float) -> float:
        """The time from `ready` on at which the links have delivered what an action needs to start."""
        stage, op, microbatch, piece = action
        if self._back and op in _WAITS_FOR_ACTIVATION:
            ready = max(ready, self._back.get((stage, microbatch, piece), 0.0))
        if ready >= self.quiet[rank]:
            return ready
        if op is REDUCE_GRAD:
            return self.quiet[rank] if meets(action) else ready
        if op in _READS_PARAMETERS and (gathered := self._gathered.get((rank, stage))):
            ready = max(ready, gathered[0 if op is F else -1])
        return ready

    def compute(self, rank: int, action: Action, start: float, seconds: float) -> tuple[float, float]:
        """Run a computation of `seconds` that links make longer; returns its end, and the seconds it waited inside."""
        stage, count = action.stage, self._counts[action.stage]
        now, waited, each = start, 0.0, seconds / count
        reduction = action.with_op(REDUCE_GRAD) if action in self._last_backwards else None
        if reduction is None and start >= self.quiet[rank] and not self._one_by_one:
            return sum(repeat(each, count), now), 0.0
        gathered = self._gathered.get((rank, stage)) if action.op in _READS_PARAMETERS else None
        for unit in range(count):
            there = max(now, gathered[unit]) if gathered is not None else now
            if reduction is not None and unit:
                there = self._reduce(rank, reduction, there)
            if gathered is not None and self._one_by_one and unit + 1 < count:
                gathered.append(self._transfer(rank, Action(stage, Op.UNSHARD), there))
            waited += there - now
            now = self._slowed(rank, there, each)
        there = now if reduction is None else self._reduce(rank, reduction, now)
        return there, waited + there - now

    def _reduce(self, rank: int, reduction: Action, now: float) -> float:
        """Start the reduction of one computed unit and return when its rank can continue."""
        if self._one_reduction:
            now = max(now, self._reduced.get(rank, 0.0))
        self._reduced[rank] = self._transfer(rank, reduction, now)
        return now

    def _slowed(self, rank: int, now: float, seconds: float) -> float:
        """The end of a computation that is slowed down while the data link is busy."""
        busy, left = self._busy[rank], 1 - self._slowdown
        while busy and seconds > 0:
            begin, end = busy[0]
            if end <= now:
                busy.popleft()
                continue
            before = max(0.0, begin - now)
            if before >= seconds:
                break
            now, seconds = now + before, seconds - before
            beside = (end - now) * left
            if beside >= seconds:
                return now + seconds / left
            now, seconds = end, seconds - beside
        return now + seconds


def link_seconds(
    pipeline: Schedule | Program, schedule: Schedule, costs: Costs, network: Network, counts: tuple[int, ...]
) -> dict[Op, list[float]]:
    """For each op, the seconds per stage of one action, or of one unit. Raises InputError for missing bytes."""
    seconds = {op: list(costs.others(op, schedule)) for op in LINKS}
    data = pipeline.data if isinstance(pipeline, Program) else None
    if data is not None:
        parameters, gradients = costs.state_bytes(schedule)
        limited = network.data_bytes_per_second is not None or network.data_sum_bytes_per_second is not None
        if limited and parameters is None:
            raise no_bytes("the data link has", "parameter_bytes")
        for stage, count in enumerate(counts):
            gathered, reduced = ((sizes[stage] / count if sizes else 0.0) for sizes in (parameters, gradients))
            gathering, reducing = gather_seconds(data, gathered, network), reduce_seconds(data, reduced, network)
            seconds[Op.UNSHARD][stage] = seconds[Op.UNSHARD][stage] / count + gathering
            seconds[Op.REDUCE_GRAD][stage] = seconds[Op.REDUCE_GRAD][stage] / count + reducing
    bandwidth = network.memory_bytes_per_second
    if bandwidth is not None and any(action.op is Op.OFFLOAD for _, action in pipeline.actions()):
        kept = costs.bytes_kept(schedule)
        if kept is None:
            raise no_bytes("the memory link has", "activation_bytes")
        for op in (Op.OFFLOAD, Op.RELOAD):
            seconds[op] = [each + size / bandwidth for each, size in zip(seconds[op], kept[0], strict=True)]
    return seconds
