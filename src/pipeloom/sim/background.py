"""What runs beside the computations of a rank: gathers and reductions of a data axis, and moves of activations.

Each rank has two links of its own, and either serves one action after the other, in the order in which the rank comes
to them: the data link goes to the other copies of the pipeline, the memory link to slower memory of its machine. The
rank goes on at once. A computation waits until the parameters that it reads have been gathered, or the activation that
it needs is back; the sum over ranks that hold the same parameters, for the reductions of its rank.

With D copies and n bytes of a stage, a ring of D - 1 rounds takes (D - 1) / D * n bytes of each copy's link to gather
or to reduce and scatter, and twice as many to reduce to all (Patarasuk and Yuan, 2009); a parameter server's link takes
D - 1 times n. Copies are alike, so they meet without waiting.
"""

from __future__ import annotations

from pipeloom.errors import InputError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.data_axis import DataAxis, DataStrategy
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.walk import meets
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network
from pipeloom.sim.rows import Span

LINKS = {Op.UNSHARD: "data", Op.REDUCE_GRAD: "data", Op.OFFLOAD: "memory", Op.RELOAD: "memory"}
_WAITS_FOR_PARAMETERS = frozenset({Op.F, Op.B, Op.I})
_WAITS_FOR_ACTIVATION = frozenset({Op.B, Op.I})


def ring_seconds(size: float, degree: int, bytes_per_second: float | None, latency_seconds: float) -> float:
    """What a ring of `degree` members takes to gather `size` bytes, or to reduce and scatter them."""
    transfer = 0.0 if bytes_per_second is None else (degree - 1) / degree * size / bytes_per_second
    return transfer + (degree - 1) * latency_seconds


def server_seconds(size: float, degree: int, bytes_per_second: float | None, latency_seconds: float) -> float:
    """What one member takes to send `size` bytes to each of the others, or to get as many from each."""
    transfer = 0.0 if bytes_per_second is None else (degree - 1) * size / bytes_per_second
    return transfer + (latency_seconds if degree > 1 else 0.0)


def gather_seconds(data: DataAxis, size: float, network: Network) -> float:
    """UNSHARD of `size` bytes of parameters."""
    if not data.shards_optimizer:
        return 0.0
    formula = server_seconds if data.strategy is DataStrategy.PARAMETER_SERVER else ring_seconds
    return formula(size, data.degree, network.data_bytes_per_second, network.data_latency_seconds)


def reduce_seconds(data: DataAxis, size: float, network: Network) -> float:
    """REDUCE_GRAD of `size` bytes of gradients."""
    formula = server_seconds if data.strategy is DataStrategy.PARAMETER_SERVER else ring_seconds
    seconds = formula(size, data.degree, network.data_bytes_per_second, network.data_latency_seconds)
    return 2 * seconds if data.strategy is DataStrategy.DDP else seconds


class Background:
    """The links beside all ranks, while a program is simulated.

    Attributes:
        spans: for each rank, what its links did.
    """

    def __init__(self, pipeline: Schedule | Program, costs: Costs, network: Network) -> None:
        schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
        self.spans: list[list[Span]] = [[] for _ in pipeline.orders]
        self._seconds = _seconds(pipeline, schedule, costs, network)
        self._free: dict[tuple[int, str], float] = {}
        self._gathered: dict[tuple[int, int], float] = {}  # of rank and stage, since when its parameters are there
        self._back: dict[Action, float] = {}  # of RELOADs

    def begin(self, rank: int, action: Action, now: float) -> None:
        """A rank comes to an action that keeps it not."""
        link = LINKS[action.op]
        start = max(now, self._free.get((rank, link), 0.0))
        end = start + self._seconds[action.op][action.stage]
        self._free[rank, link] = end
        self.spans[rank].append(Span(action, start, end))
        if action.op is Op.UNSHARD:
            self._gathered[rank, action.stage] = end
        elif action.op is Op.RELOAD:
            self._back[action] = end

    def there(self, rank: int, action: Action) -> float:
        """When what an action of a rank needs of its links is there; 0 where it needs nothing."""
        there = 0.0
        if action.op in _WAITS_FOR_PARAMETERS:
            there = self._gathered.get((rank, action.stage), 0.0)
        if action.op in _WAITS_FOR_ACTIVATION and self._back:
            there = max(there, self._back.get(action.with_op(Op.RELOAD), 0.0))
        return self._free.get((rank, "data"), 0.0) if meets(action) else there


def _seconds(pipeline: Schedule | Program, schedule: Schedule, costs: Costs, network: Network) -> dict[Op, list[float]]:
    """For each of the ops, the seconds of one action on each stage.

    Raises:
        InputError: a link has a bandwidth, and the costs no bytes of what goes over it.
    """
    stages = range(schedule.num_stages)
    seconds = {op: [costs.other.get(op, 0.0) for _ in stages] for op in LINKS}
    data = pipeline.data if isinstance(pipeline, Program) else None
    if data is not None:
        parameters, gradients = costs.state_bytes(schedule)
        if network.data_bytes_per_second is not None and parameters is None:
            raise InputError("the data axis has a bandwidth, but the costs no parameter_bytes of the stages; add them")
        for stage in stages:
            seconds[Op.UNSHARD][stage] += gather_seconds(data, parameters[stage] if parameters else 0.0, network)
            seconds[Op.REDUCE_GRAD][stage] += reduce_seconds(data, gradients[stage] if gradients else 0.0, network)
    bandwidth = network.memory_bytes_per_second
    if bandwidth is not None and any(action.op is Op.OFFLOAD for _, action in pipeline.actions()):
        kept = costs.bytes_kept(schedule)
        if kept is None:
            raise InputError("the memory link has a bandwidth, but the costs no activation_bytes; add them to stages")
        for stage in stages:
            for op in (Op.OFFLOAD, Op.RELOAD):
                seconds[op][stage] += kept[0][stage] / bandwidth
    return seconds
