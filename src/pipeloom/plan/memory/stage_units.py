"""The units of a model's stages, as a run forms them, and the bytes that they communicate."""

from __future__ import annotations

import math
from typing import NamedTuple

from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.schedule import Program
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse, group_parameters
from pipeloom.plan.memory.memory_model import MemoryModel, num_parameters
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.sim.costs import MOST_UNITS


class StageUnits(NamedTuple):
    """The parameters of a stage in its order, and its units as positions among them."""

    parameters: list[ParameterUse]
    units: list[list[int]]


def units_of_rank(program: Program, model: MemoryModel, rank: int) -> dict[int, StageUnits]:
    """The units of each stage of a rank. Parameters that several of its stages share belong to the first of them."""
    homes: dict[str, tuple[int, ...]] = {}
    for stage, layers in enumerate(model.stages):
        for name in dict.fromkeys(name for layer in layers for name in layer.parameters):
            homes[name] = (*homes.get(name, ()), stage)
    granularity = program.data.granularity if program.data else Granularity.STEP
    rule = BucketRule.of(granularity, model.bucket_bytes, whole_parameters=model.whole_parameters)
    seen: set[str] = set()
    found = {}
    for stage in program.placement.stages_of[rank]:
        parameters = [use for use in _uses(model, stage, homes) if use.name not in seen]
        seen.update(use.name for use in parameters)
        found[stage] = StageUnits(parameters, group_parameters(parameters, rule))
    return found


def _uses(model: MemoryModel, stage: int, homes: dict[str, tuple[int, ...]]) -> list[ParameterUse]:
    number_bytes = NumberBytes.of(model.precision).compute
    layers: dict[str, list[int]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(model.stages[stage]):
        for name, shape in layer.parameters.items():
            layers.setdefault(name, []).append(index)
            shapes[name] = shape
    return [
        ParameterUse(name, number_bytes * math.prod(shape), tuple(layers[name]), homes[name])
        for name, shape in shapes.items()
    ]


def unit_counts(program: Program, model: MemoryModel) -> tuple[int, ...]:
    """For each stage, the number of units in which it is gathered and reduced (`Costs.units`)."""
    counts = [1] * program.schedule.num_stages
    for rank in range(program.num_ranks):
        for stage, (_, units) in units_of_rank(program, model, rank).items():
            counts[stage] = min(MOST_UNITS, max(counts[stage], len(units)))
    return tuple(counts)


def stage_bytes(model: MemoryModel) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each stage, the bytes of its parameters and of their gradients, as replicas exchange them."""
    formats = NumberBytes.of(model.precision)
    counts = [num_parameters(stage) for stage in model.stages]
    return tuple(float(formats.compute * n) for n in counts), tuple(float(formats.gradient * n) for n in counts)
