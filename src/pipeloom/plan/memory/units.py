"""Which parameters of a stage are gathered and reduced together, as a run puts them together."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.schedule import Program
from pipeloom.parallel.data.buckets import BucketRule, Item
from pipeloom.plan.memory.layer_memory import num_parameters
from pipeloom.plan.memory.state_bytes import Formats
from pipeloom.sim.costs import MOST_UNITS

if TYPE_CHECKING:
    from pipeloom.plan.memory.rank_memory import Model


class Held(NamedTuple):
    """A parameter of a stage."""

    name: str
    shape: tuple[int, ...]
    layer: int


class StageUnits(NamedTuple):
    """The units of a stage: of parameters of its own, and of those that it shares with other stages."""

    own: list[list[Held]]
    tied: list[list[Held]]


def units_of_rank(program: Program, model: Model, rank: int) -> dict[int, StageUnits]:
    """As `pipeloom.parallel.data.stage_parameters.group_parameters` does, of a model in one format.

    What several stages of the rank share is the first one's.
    """
    homes: dict[str, set[int]] = {}
    for stage, layers in enumerate(model.stages):
        for layer in layers:
            for name in layer.parameters:
                homes.setdefault(name, set()).add(stage)
    granularity = program.data.granularity if program.data else Granularity.STEP
    rule = BucketRule.of(granularity, model.bucket_bytes, whole_parameters=model.whole_parameters)
    number_bytes = Formats.of(model.precision).compute
    seen: set[str] = set()
    units = {}
    for stage in program.placement.stages_of[rank]:
        row: list[Held] = []
        tied: dict[tuple[int, ...], list[Held]] = {}
        for index, layer in enumerate(model.stages[stage]):
            for name, shape in layer.parameters.items():
                if name in seen:
                    continue
                seen.add(name)
                alike = row if len(homes[name]) == 1 else tied.setdefault(tuple(sorted(homes[name])), [])
                alike.append(Held(name, tuple(shape), index))
        buckets = rule.cut([Item(held.layer, number_bytes * math.prod(held.shape)) for held in row])
        own = [[row[index] for index in bucket] for bucket in buckets]
        units[stage] = StageUnits(own, [sorted(group) for group in tied.values()])
    return units


def unit_counts(program: Program, model: Model) -> tuple[int, ...]:
    """For each stage, in how many pieces its parameters are gathered and its gradients reduced (`Costs.units`)."""
    counts = [1] * program.schedule.num_stages
    for rank in range(program.num_ranks):
        for stage, units in units_of_rank(program, model, rank).items():
            counts[stage] = min(MOST_UNITS, max(counts[stage], len(units.own) + len(units.tied)))
    return tuple(counts)


def stage_bytes(model: Model) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage, the bytes of its parameters and of their gradients, as they go to other copies."""
    formats = Formats.of(model.precision)
    counts = [num_parameters(stage) for stage in model.stages]
    return tuple(float(formats.compute * n) for n in counts), tuple(float(formats.gradient * n) for n in counts)
