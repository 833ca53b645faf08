"""A lower bound of a step whose ranks gather parameters and reduce gradients over data links. No torch here.

The data link of a rank serves one transfer at a time, in units that are parts of a stage:

    gather    F of a stage computes each unit once it is gathered, after all earlier stages of its rank
    work      after the first F of a stage, its rank computes all backwards, and all forwards of later stages
    reduce    the last backward of a stage begins after a micro-batch has run through all stages and back, and after
              all other micro-batches of the stage; each of its units is then reduced

The last reductions of all stages of a rank begin after the first unit of one of them, and follow each other.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add

from pipeloom.ir import Placement
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_bound import moves_of
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim.data_link import gather_seconds, reduce_seconds


def link_bound(
    costs: StepCosts,
    of: Configuration,
    placement: Placement,
    stages: Sequence[Seconds],
    message: float,
    *,
    split: bool = True,
) -> float:
    """Seconds of a step without update, at least; 0 where several ranks hold a stage.

    Args:
        costs: of the model on its cluster.
        of: the configuration, with replicas that have the same parameters.
        placement: where its stages are.
        stages: seconds of every stage, of a slice where there are slices.
        message: seconds of a message between ranks.
        split: whether backwards may be split into I and W.
    """
    if placement.is_replicated:
        return 0.0
    network, data, formats = costs.network(of), of.data_axis(), NumberBytes.of(of.precision)
    units = costs.stage_units(of)
    sizes = [size / number for size, number in zip(costs.parameters(of), units, strict=True)]  # of one unit
    pairs = list(zip(units, sizes, strict=True))
    links = {
        (n, size): (
            n * gather_seconds(data, formats.compute * size, network),
            n * reduce_seconds(data, formats.gradient * size, network),
        )
        for n, size in set(pairs)  # most stages are alike
    }
    gathers, sums = [links[each][0] for each in pairs], [links[each][1] for each in pairs]
    if not split:  # the gradient leaves once W has run too
        stages = [Seconds(forward, inputs + weights, 0.0) for forward, inputs, weights in stages]
    backwards = [each.backward_input + each.backward_weight for each in stages]
    sends = [*(message * moves for moves in moves_of(placement)), 0.0]
    count = of.microbatches * of.slices
    ends = _first_forwards(stages, placement, gathers, units, sends)
    begins = _last_backwards(stages, backwards, ends, sends, count)
    # Of the last backward and the reductions of every stage, and of its first unit alone.
    both = [
        max(seconds / n + total, seconds + total / n) for seconds, total, n in zip(backwards, sums, units, strict=True)
    ]
    one = [seconds / n for seconds, n in zip(backwards, units, strict=True)]
    bound: float = max(map(add, begins, both))
    returns = list(accumulate(map(add, [each.backward_input for each in stages], sends), initial=0.0))
    for held in placement.stages_of:
        forwards = later = 0.0  # the end of all forwards; those of later stages
        for stage in reversed(held):
            each = stages[stage].forward
            forwards = max(forwards, ends[stage] + (count - 1) * each + later)
            later += count * each
        inputs = forwards + count * sum(stages[stage].backward_input for stage in held)
        work = forwards + count * sum(backwards[stage] for stage in held)
        bound = max(
            bound,
            min(begins[stage] + one[stage] for stage in held) + sum(sums[stage] for stage in held),
            work + min(both[stage] - backwards[stage] for stage in (held if split else held[:1])),
        )
        if held[0]:  # the last gradient goes back to the first stage
            bound = max(bound, inputs + returns[held[0]] - stages[0].backward_input + both[0])
    return bound


def _first_forwards(
    stages: Sequence[Seconds],
    placement: Placement,
    gathers: Sequence[float],
    units: Sequence[int],
    sends: Sequence[float],
) -> list[float]:
    """When the first F of every stage ends, at the earliest: its units come one after the other."""
    ends: list[float] = []
    gathered, there = [0.0] * placement.num_ranks, 0.0
    for stage, ((forward, _, _), (rank,)) in enumerate(zip(stages, placement.replicas, strict=True)):
        begin = max(there, gathered[rank] + gathers[stage] / units[stage])
        gathered[rank] += gathers[stage]
        ends.append(max(begin + forward, gathered[rank] + forward / units[stage]))
        there = ends[-1] + sends[stage]
    return ends


def _last_backwards(
    stages: Sequence[Seconds], backwards: Sequence[float], ends: Sequence[float], sends: Sequence[float], count: int
) -> list[float]:
    """When the last backward of every stage begins, at the earliest, where its first F ends at `ends`."""
    begins, back = [0.0] * len(stages), ends[-1]  # when the first gradient is there
    for stage in range(len(stages) - 1, -1, -1):
        own = ends[stage] + (count - 1) * (stages[stage].forward + backwards[stage])
        begins[stage] = max(back, own)
        back += stages[stage].backward_input + sends[stage - 1]
    return begins
