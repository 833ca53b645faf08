"""How often ranks gather their stages and reduce their gradients, at granularities chunk and microbatch. No torch here.

A rank gathers a stage for each run of computations that read its parameters, and reduces its gradients behind each run
with a backward (`pipeloom.passes.data_parallel`). So its data link is busy for the sum of these, at least.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.ir.data_axis import Granularity
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.short_steps import schedule_of, short_microbatches
from pipeloom.sim.data_link import gather_seconds, reduce_seconds


class Runs(NamedTuple):
    """Of a stage in a step: how often it is gathered, and how often its gradients are reduced."""

    gathers: int
    sums: int


def runs_seconds(costs: StepCosts, of: Configuration, placement: Placement) -> float:
    """Seconds for which the runs of a step keep the busiest data link busy; 0 where stages have one run each.

    Args:
        costs: of the model on its cluster.
        of: the configuration, with a data strategy.
        placement: where its stages are.
    """
    if of.granularity is Granularity.STEP or of.replicas == 1 or of.inside.expert > 1:
        return 0.0
    network, data, formats = costs.network(of), of.data_axis(), NumberBytes.of(of.precision)
    units, busiest = costs.stage_units(of), 0.0
    for held, runs in zip(placement.stages_of, data_runs(of, placement), strict=True):
        busy = before = 0.0
        for number, (stage, each) in enumerate(zip(held, runs, strict=True)):
            elements = costs.held_parameters(of, held[: number + 1])  # what stages share is gathered once
            size, before = (elements - before) / units[stage], elements
            if of.strategy.shards_parameters:
                busy += units[stage] * each.gathers * gather_seconds(data, formats.compute * size, network)
            busy += units[stage] * each.sums * reduce_seconds(data, formats.gradient * size, network)
        busiest = max(busiest, busy)
    return busiest


def data_runs(of: Configuration, placement: Placement) -> list[list[Runs]]:
    """For each rank, the runs of its stages, at least."""
    if schedules.find(of.schedule).to_measure:
        return [[Runs(1, 1)] * len(held) for held in placement.stages_of]
    number, group = short_microbatches(of, of.stages)
    fine = of.granularity is Granularity.MICROBATCH
    found = _runs(of.schedule, of.pipeline, number, of.chunks, of.slices, fine)
    times = (of.microbatches - number) // group
    if not times:
        return found
    less = _runs(of.schedule, of.pipeline, number - group, of.chunks, of.slices, fine)
    return [[_longer(*each, times) for each in zip(*both, strict=True)] for both in zip(found, less, strict=True)]


def _longer(runs: Runs, less: Runs, times: int) -> Runs:
    return Runs(*(number + times * (number - before) for number, before in zip(runs, less, strict=True)))


@lru_cache(maxsize=512)
def _runs(name: str, ranks: int, microbatches: int, chunks: int, slices: int, fine: bool) -> list[list[Runs]]:
    schedule = schedule_of(name, ranks, microbatches, chunks, slices)
    held = schedule.placement.stages_of
    return [_of_rank(*each, schedule, fine=fine) for each in zip(schedule.orders, held, strict=True)]


def _of_rank(order: Sequence[Action], held: Sequence[int], schedule: Schedule, *, fine: bool) -> list[Runs]:
    gathers, sums = (dict.fromkeys(held, 0) for _ in range(2))
    ends = dict.fromkeys(held, -2)  # the last computation, or overlapped pair, of each stage
    reads, adds = set[int](), set[int]()  # stages whose present run has read parameters, or added to gradients
    number, second = -1, False
    for action in order:
        stage, op, *_ = action
        number += not second
        second = not second and action in schedule.partners
        if ends[stage] < (number if fine else number - 1):
            reads.discard(stage)
            adds.discard(stage)
        ends[stage] = number
        if op is not Op.W and stage not in reads:
            reads.add(stage)
            gathers[stage] += 1
        if (op is Op.B or op is Op.W) and stage not in adds:
            adds.add(stage)
            sums[stage] += 1
    return [Runs(gathers[stage], sums[stage]) for stage in held]
