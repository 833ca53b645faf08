"""How data-parallel replicas may share the states of a configuration, and the bytes of these. No torch here."""

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.ir.data_axis import DataAxis, DataStrategy, Granularity
from pipeloom.parallel.options import Precision
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.request import Request

# Those that hold and communicate least first. Granularities of zero1 are the same.
_WAYS = (
    (DataStrategy.DDP, Granularity.STEP),
    (DataStrategy.ZERO1, Granularity.STEP),
    (DataStrategy.ZERO2, Granularity.STEP),
    (DataStrategy.ZERO3, Granularity.STEP),
    (DataStrategy.ZERO2, Granularity.CHUNK),
    (DataStrategy.ZERO3, Granularity.CHUNK),
    (DataStrategy.ZERO2, Granularity.MICROBATCH),
    (DataStrategy.ZERO3, Granularity.MICROBATCH),
)
# Until its reduction at the end of the step, each stage has full gradients, and parameters of zero3 are gathered.
_AS_ZERO1 = ((DataStrategy.ZERO2, Granularity.STEP), (DataStrategy.ZERO3, Granularity.STEP))


PENALTIES = {Granularity.STEP: 1.0, Granularity.CHUNK: 1.1, Granularity.MICROBATCH: 1.2}  # they hide less


class Way(NamedTuple):
    """A mesh with a data strategy.

    Attributes:
        of: the configuration.
        states: bytes of model states per parameter, between steps.
        seconds: of a step without offload of activations, at least.
        peak: bytes of the rank that needs most, at least.
        offloaded: seconds of a step with offload, at least; infinite where there is none.
    """

    of: Configuration
    states: float
    seconds: float
    peak: float
    offloaded: float = inf

    @property
    def least(self) -> float:
        """Seconds of a step, at least."""
        return min(self.seconds, self.offloaded)


class Ways(NamedTuple):
    """The data strategies of a mesh, and the least of their values.

    Attributes:
        each: at least one.
        least, seconds, peak: see `Way`.
        penalty: how many times their bounds count.
        devices: of the mesh.
    """

    each: Sequence[Way]
    least: float
    seconds: float
    peak: float
    penalty: float
    devices: int

    @classmethod
    def of(cls, each: Sequence[Way]) -> "Ways":
        """Those of at least one strategy."""
        return cls(
            each,
            min(way.least for way in each),
            min(way.seconds for way in each),
            min(way.peak for way in each),
            min(PENALTIES[way.of.granularity] for way in each),
            each[0].of.devices,
        )


def ways_of(
    of: Configuration, request: Request, *, offloads_states: bool
) -> list[tuple[DataStrategy, Granularity, bool]]:
    """Data strategies and granularities, and whether states are offloaded.

    Offload comes before strategies and granularities that communicate more to hold less. On many devices there is no
    time for both.
    """
    ways = _strategies_of(of, request)
    if "offload_states" in request.fixed or not offloads_states:
        return [(*way, request.fixed.get("offload_states", False)) for way in ways]
    once = [way for way in ways if way[1] is Granularity.STEP and way[0] is not DataStrategy.PARAMETER_SERVER] or ways
    others = [way for way in ways if way not in once]
    kinds = (False,) if request.of_many else (False, True)
    first = [(*way, states) for states in (False, True) for way in once]
    return first + [(*way, states) for states in kinds for way in others]


def _strategies_of(of: Configuration, request: Request) -> list[tuple[DataStrategy, Granularity]]:
    """Data strategies and granularities that have an effect; with one replica none has."""
    if of.replicas == 1:
        return [(DataStrategy.DDP, Granularity.STEP)]
    same = () if "data_strategy" in request.fixed else _AS_ZERO1
    return [
        (strategy, granularity)
        for strategy, granularity in (*_WAYS, (DataStrategy.PARAMETER_SERVER, Granularity.STEP))
        if request.allows("data_strategy", strategy)
        and request.allows("data_granularity", granularity)
        and (strategy, granularity) not in same
        and (strategy is not DataStrategy.PARAMETER_SERVER or "data_strategy" in request.fixed)
    ]


def without_effect(request: Request) -> str | None:
    """The fixed key that has no effect with one replica; None: there is none."""
    usual = {"data_strategy": DataStrategy.DDP, "data_granularity": Granularity.STEP}
    return next((key for key, value in usual.items() if request.fixed.get(key, value) != value), None)


def one_stage_each(request: Request) -> bool:
    """Whether each rank has one stage in all plans."""
    family = schedules.find(request.fixed["schedule"]) if "schedule" in request.fixed else None
    given = request.fixed.get("chunks", 2 if request.allows("chunks", 2) else 1)
    return given == 1 or (family is not None and family.chunks == 1)


def way_bytes(
    of: Configuration, strategy: DataStrategy, granularity: Granularity, *, offload_states: bool, one_stage: bool
) -> tuple[float, float]:
    """Bytes of a rank per parameter, beside activations: between steps, and at least during a step.

    Of several stages of a rank, gradients may be reduced, and gathered parameters freed, one after the other.
    """
    data = of.data_axis(strategy, granularity)
    single = of.microbatches == 1 or not one_stage
    return _bytes_per_parameter(of.precision, of.optimizer, data, offload_states, single)


def state_bytes_per_parameter(of: Configuration) -> float:
    """Bytes of parameters, masters and optimizer states per parameter of a stage, between steps."""
    return _bytes_per_parameter(of.precision, of.optimizer, of.data_axis(), of.offload_states, True)[0]


@lru_cache(maxsize=4096)
def _bytes_per_parameter(
    precision: Precision, optimizer: str, data: DataAxis, offload_states: bool, single: bool
) -> tuple[float, float]:
    """Between steps, and at least during a step, `single` where its whole gradients need not be there together."""
    formats, strategy = NumberBytes.of(precision), data.strategy
    shards = data.degree if strategy.shards_optimizer else 1
    each = 0.0 if strategy.shards_parameters else float(formats.compute)
    if formats.has_masters or strategy.shards_parameters:
        each += 4 / shards
    each += 0.0 if offload_states else 4 * OPTIMIZERS[optimizer] / shards
    once = data.granularity is Granularity.STEP
    least = each + formats.gradient / (data.degree if strategy.shards_optimizer and (not once or single) else 1)
    if strategy.shards_parameters and once and not single:
        least += formats.compute
    return each, least
