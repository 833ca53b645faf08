"""A lower bound of a step in closed form: no schedule of these computations on this placement is faster. No torch here.

Of a rank with stages s, which runs F, I and W of m micro-batches:

    before its first F    F of all stages before its first one, on one micro-batch, and their messages
    its computations      m times its F, I and W
    after its last I      I of all stages before its first one, their messages, and one W of the first stage of all; or
                          its own W
    unsplit backwards     after its last B, B of all stages before its first one, and their messages

Slices count as micro-batches of a part of the time. The step also has all F and I of one micro-batch, one after the
other, and the optimizer's update. Waits for busy links do not count; `busy_links` bounds a step by the link that its
messages keep busy the longest. `pipeloom.sim.simulate` never takes less; tests compare.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from operator import add

from pipeloom.ir import Placement, Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim import Network


def step_bound(costs: StepCosts, of: Configuration, schedule: Schedule | None = None) -> float:
    """Seconds that a step takes at least.

    Args:
        costs: of the transformer on its cluster.
        of: the configuration.
        schedule: for its placement and kind; None: a synchronous one whose stages go round the ranks.
    """
    placement = schedule.placement if schedule else _loop(of.pipeline, of.chunks)
    update = costs.update_seconds(of, placement.stages_of)
    if schedule is not None and schedule.microbatches_per_update is not None:
        return update  # of a stream: steps overlap
    stages = costs.stage_seconds(of)
    if schedule is not None and schedule.forward_only:
        stages = [Seconds(each.forward, 0.0, 0.0) for each in stages]
    count = of.slices
    each = [Seconds(*(seconds / count for seconds in stage)) for stage in stages] if count > 1 else stages
    split = schedule is None or bool(schedule.split_backwards)
    return pipeline_bound(each, placement, of.microbatches * count, message_seconds(costs, of), split=split) + update


def message_seconds(costs: StepCosts, of: Configuration) -> float:
    """Least seconds of a message between ranks."""
    latency, rate = costs.network(of).fastest
    return latency + costs.message_bytes(of) / of.slices / rate


def busy_links(costs: StepCosts, of: Configuration, placement: Placement) -> float:
    """Seconds for which messages between stages keep some link busy in a step."""
    if of.pipeline == 1:
        return 0.0
    return of.microbatches * costs.message_bytes(of) * _busiest(costs.network(of), placement)


@lru_cache(maxsize=4096)
def _busiest(network: Network, placement: Placement) -> float:
    """Seconds per byte of a message for which one micro-batch, forth and back, keeps the busiest link busy."""
    shared = network.shared_links(placement.num_ranks)
    usual = 1 / (network.bytes_per_second or inf)
    busy: dict[object, float] = defaultdict(float)
    for senders, receivers in pairwise(placement.replicas):
        ways = max(len(senders), len(receivers))
        for way in range(ways):
            pair = senders[way % len(senders)], receivers[way % len(receivers)]
            for source, target in (pair, pair[::-1]) if pair[0] != pair[1] else ():
                link = shared.get((source, target))
                rate = usual if link is None else 1 / network.links[link].bytes_per_second
                busy[(source, target) if link is None else link] += rate / ways
    return max(busy.values(), default=0.0)


def pipeline_bound(
    stages: Sequence[Seconds], placement: Placement, microbatches: int, message: float, *, split: bool = True
) -> float:
    """The bound without update: of the placement and of times per micro-batch.

    Args:
        stages: seconds of every stage.
        placement: where they are.
        microbatches: per step.
        message: seconds of a message between ranks.
        split: whether backwards may be split into I and W.
    """
    forward = [each[0] for each in stages]
    if split:
        inputs, weights = [each[1] for each in stages], [each[2] for each in stages]
    else:  # the gradient leaves once W has run too
        inputs, weights = [each[1] + each[2] for each in stages], [0.0] * len(stages)
    sends = [message * moves for moves in moves_of(placement)]
    there = [0.0, *accumulate(map(add, forward, sends))]
    back = [0.0, *accumulate(map(add, inputs, sends))]
    last = weights[0]
    bound = sum(forward) + sum(inputs) + 2 * sum(sends) + last
    if placement.is_replicated:
        return max(bound, _shared_stages(stages, placement, microbatches, there, back, split=split))
    chains = list(map(add, forward, inputs))
    for held in placement.stages_of:
        first = held[0]
        chain = there[first] + microbatches * sum([chains[stage] for stage in held])
        own = microbatches * sum([weights[stage] for stage in held]) if split else 0.0
        bound = max(bound, chain + back[first] + (last if first else 0.0), chain + own)
    return bound


def _shared_stages(
    stages: Sequence[Seconds],
    placement: Placement,
    microbatches: int,
    there: Sequence[float],
    back: Sequence[float],
    *,
    split: bool,
) -> float:
    """The bound of the busiest rank where several ranks hold a stage, each for its share of the micro-batches."""
    bound = 0.0
    for held in placement.stages_of:
        work = 0.0
        for stage in held:
            share = microbatches // len(placement.replicas[stage])
            work += share * sum(stages[stage])
        first = min(held)
        bound = max(bound, there[first] + work + (0.0 if split else back[first]))
    return bound


@lru_cache(maxsize=4096)
def _loop(ranks: int, chunks: int) -> Placement:
    return Placement.loop(ranks, chunks)


@lru_cache(maxsize=4096)
def moves_of(placement: Placement) -> tuple[bool, ...]:
    """For each stage but the last, whether its output goes to another rank."""
    return tuple(not set(a) & set(b) for a, b in pairwise(placement.replicas))
