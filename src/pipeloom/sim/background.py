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
F, REDUCE_GRAD = Op.F, Op.REDUCE_GRAD  # looking up a member of an enumeration takes as long as two tuples


class Background:
    """The data and memory links of all ranks while a program is simulated.

    Attributes:
        spans: for each rank, the transfers on its links, one per unit if stages have units.
        inside: whether links make computations longer.
    """

    def __init__(self, pipeline: Schedule | Program, costs: Costs, network: Network) -> None:
        schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
        data = pipeline.data if isinstance(pipeline, Program) else None
        counts = costs.unit_counts(schedule) if data is not None else None
        self.spans: list[list[Span]] = [[] for _ in pipeline.orders]
        self._in_units = counts is not None
        self._counts = counts or (1,) * schedule.num_stages
        self._seconds = link_seconds(pipeline, schedule, costs, network, self._counts)  # of one unit
        self._slowdown = network.data_slowdown if data is not None else 0.0
        self.inside = self._in_units or self._slowdown > 0
        self._one_by_one = data is not None and gathers_inside(data)
        self._one_reduction = data is not None and data.strategy.shards_optimizer
        reductions = pipeline.data_reductions if isinstance(pipeline, Program) and self._in_units else frozenset()
        self._last_backwards = frozenset(a.with_op(op) for a in reductions for op in (Op.B, Op.W))
        self._free: dict[tuple[int, str], float] = {}
        self._reduced: dict[int, float] = {}  # of a rank, the end of its last reduction
        self._gathered: dict[tuple[int, int], list[float]] = {}  # of rank and stage, when each unit was gathered
        self._back: dict[tuple[int, int | None, int | None], float] = {}  # ends of RELOADs
        self._busy: list[deque[Span]] = [deque() for _ in pipeline.orders]  # pending transfers of data links

    def begin(self, rank: int, action: Action, now: float) -> None:
        """Issue a background action at `now`; the rank continues at once."""
        if action.op is Op.UNSHARD:
            count = 1 if self._one_by_one else self._counts[action.stage]
            self._gathered[rank, action.stage] = [self._transfer(rank, action, now) for _ in range(count)]
        elif action.op is Op.RELOAD:
            self._back[action.stage, action.microbatch, action.slice] = self._transfer(rank, action, now)
        elif action.op is Op.OFFLOAD or not self._in_units:  # else backwards have started it
            self._transfer(rank, action, now)

    def _transfer(self, rank: int, action: Action, now: float) -> float:
        """Put one transfer on its link and return its end."""
        link = LINKS[action.op]
        start = max(now, self._free.get((rank, link), 0.0))
        span = Span(action, start, start + self._seconds[action.op][action.stage])
        self._free[rank, link] = span.end
        self.spans[rank].append(span)
        if self._slowdown and link == "data":
            self._busy[rank].append(span)
        return span.end

    def there(self, rank: int, action: Action) -> float:
        """The time at which the links have delivered what an action needs to start; 0 if it needs nothing."""
        stage, op, microbatch, piece = action
        if op is REDUCE_GRAD:
            return self._free.get((rank, "data"), 0.0) if meets(action) else 0.0
        there = 0.0
        if op in _READS_PARAMETERS and (gathered := self._gathered.get((rank, stage))):
            there = gathered[0 if op is F else -1]
        if self._back and op in _WAITS_FOR_ACTIVATION:
            there = max(there, self._back.get((stage, microbatch, piece), 0.0))
        return there

    def compute(self, rank: int, action: Action, start: float, seconds: float) -> tuple[float, float]:
        """Run a computation of `seconds` that links make longer; returns its end, and the seconds it waited inside."""
        stage, count = action.stage, self._counts[action.stage]
        gathered = self._gathered.get((rank, stage)) if action.op in _READS_PARAMETERS else None
        reduction = action.with_op(REDUCE_GRAD) if action in self._last_backwards else None
        now, waited, each = start, 0.0, seconds / count
        all_there = gathered is None or (not self._one_by_one and gathered[-1] <= start)
        if all_there and reduction is None and not self._slowdown:
            for _ in range(count):
                now += each
            return now, 0.0
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
            if busy[0].end <= now:
                busy.popleft()
                continue
            before = max(0.0, busy[0].start - now)
            if before >= seconds:
                break
            now, seconds = now + before, seconds - before
            beside = (busy[0].end - now) * left
            if beside >= seconds:
                return now + seconds / left
            now, seconds = busy[0].end, seconds - beside
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
