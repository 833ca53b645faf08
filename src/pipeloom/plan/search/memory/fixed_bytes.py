"""Bytes of a rank beside activations at each of its moments: states, gradients, gathered parameters. No torch here."""

from pipeloom.ir import Op
from pipeloom.ir.data_axis import Granularity
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.data_ways import state_bytes_per_parameter
from pipeloom.plan.search.memory.live_moments import Moment, Moments
from pipeloom.plan.search.shapes import Shape


def fixed_bytes(costs: StepCosts, of: Configuration, shape: Shape, moments: Moments) -> list[list[float]]:
    """For each rank and moment, bytes beside activations, at least."""
    each, parameters, counts = state_bytes_per_parameter(of), costs.parameters(of), of.blocks_of(costs.num_blocks)
    formats = NumberBytes.of(of.precision)
    found: list[list[float]] = []
    coarse, fine = of.granularity is Granularity.STEP, of.granularity is Granularity.MICROBATCH
    compute = formats.compute if of.strategy.shards_parameters else 0
    for held, rank in zip(shape.placement.stages_of, moments, strict=True):
        sizes, total = {stage: parameters[stage] for stage in held}, costs.held_parameters(of, held)
        sizes[held[-1]] -= sum(sizes.values()) - total  # what several stages share counts once
        shares = 1 if coarse else of.replicas

        def used(moment: Moment, sizes: dict[int, float] = sizes) -> float:
            """Elements of the stage that computes which are there in full."""
            ends = (moment.stage == 0) + 2 * (moment.stage == len(counts) - 1)
            return sizes[moment.stage] / (counts[moment.stage] + ends) if fine else sizes[moment.stage]

        found.append([])
        for moment in rank:
            full = sum(sizes[stage] for stage in moment.summing - {moment.stage}) / shares
            if moment.stage in moment.summing:  # else its gradients come while its activations go
                full += used(moment) if moment.op is not Op.I else sizes[moment.stage] / shares
            gathered = used(moment) if moment.op is not Op.W else 0.0
            if coarse:
                gathered = sum(sizes[stage] for stage in {*moment.live, *moment.summing, moment.stage})
            found[-1].append(each * total + formats.gradient * full + compute * gathered)
    return found
