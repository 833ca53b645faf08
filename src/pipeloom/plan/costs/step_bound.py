"""A lower bound of a step in closed form: no schedule of these computations on this placement is faster. No torch here.

Of a rank with stages s, which runs F, I and W of m micro-batches:

    before its first F    F of all stages before its first one, on one micro-batch, and their messages
    its computations      m times its F, I and W
    after its last I      I of all stages before its first one, their messages, and one W of the first stage of all; or
                          its own W

Slices count as micro-batches of a part of the time. The step also has all F and I of one micro-batch, one after the
other, and the optimizer's update. Bandwidths of links count, waits for busy links do not. `pipeloom.sim.simulate` never
takes less; tests compare.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add

from pipeloom.ir import Placement, Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.stage_times import Seconds


def step_bound(costs: CostModel, of: Configuration, schedule: Schedule | None = None) -> float:
    """Seconds that a step takes at least.

    Args:
        costs: of the transformer on its cluster.
        of: the configuration.
        schedule: for its placement and kind; None: a synchronous one whose stages go round the ranks.
    """
    placement = schedule.placement if schedule else Placement.loop(of.pipeline, of.chunks)
    update = costs.update_seconds(of, placement.stages_of)
    if schedule is not None and schedule.microbatches_per_update is not None:
        return update  # of a stream: steps overlap
    stages = costs.stage_seconds(of)
    if schedule is not None and schedule.forward_only:
        stages = [Seconds(each.forward, 0.0, 0.0) for each in stages]
    each = [Seconds(*(seconds / of.slices for seconds in stage)) for stage in stages]
    return pipeline_bound(each, placement, of.microbatches * of.slices, messages(costs, of, placement)) + update


def messages(costs: CostModel, of: Configuration, placement: Placement) -> list[float]:
    """Least seconds of a message from each stage to the next; 0 within a rank."""
    network, size = costs.network(of), costs.message_bytes(of) / of.slices
    rate = max([network.bytes_per_second or float("inf"), *(link.bytes_per_second for link in network.links)])
    table = network.latency_seconds
    least = min(min(row) for row in table) if isinstance(table, tuple) else table
    pairs = zip(placement.replicas, placement.replicas[1:], strict=False)
    return [0.0 if set(a) & set(b) else least + size / rate for a, b in pairs]


def pipeline_bound(
    stages: Sequence[Seconds], placement: Placement, microbatches: int, message_seconds: Sequence[float]
) -> float:
    """The bound without update: of the placement and of times per micro-batch.

    Args:
        stages: seconds of every stage.
        placement: where they are.
        microbatches: per step.
        message_seconds: from each stage to the next.
    """
    there = [0.0, *accumulate(map(add, (each.forward for each in stages), message_seconds))]
    back = [0.0, *accumulate(map(add, (each.backward_input for each in stages), message_seconds))]
    whole = sum(each.forward + each.backward_input for each in stages) + 2 * sum(message_seconds)
    bound = whole + stages[0].backward_weight
    if any(len(ranks) > 1 for ranks in placement.replicas):  # the busiest rank is at least as busy as the mean one
        return max(bound, microbatches * sum(map(sum, stages)) / placement.num_ranks)
    for held in placement.stages_of:
        first = min(held)
        last = stages[0].backward_weight if first else 0.0  # the rank of stage 0 has this W among its own
        own = [stages[stage] for stage in held]
        chain = microbatches * sum(each.forward + each.backward_input for each in own)
        bound = max(
            bound,
            there[first] + chain + back[first] + last,
            there[first] + chain + microbatches * sum(each.backward_weight for each in own),
        )
    return bound
