"""What a partition gives up where no more minibatches are in flight than PipeDream's NOAM."""

from __future__ import annotations

import math

from pipeloom.plan.partition.partition import Partition
from pipeloom.plan.partition.profile import Profile
from pipeloom.schedules.pipedream import pipedream
from pipeloom.sim import Costs, simulate

_MOST_SIMULATED = 50_000  # forwards of a stream; more take longer than they tell
_LEAST = 600  # micro-batches, over half of which a period is taken: what a longer pattern does not divide hardly counts


def noam_period(profile: Profile, found: Partition) -> float | None:
    """Seconds of a minibatch in the steady state with NOAM in flight; None where simulating that would take long.

    Where NOAM is what makes no stage wait (`Stage.full_in_flight`), it is the period of the partition; elsewhere stages
    may wait for each other, and that is simulated. Synchronising counts as a part of the backward; a transfer takes its
    turn beside the others, and no time on the way.
    """
    if all(stage.in_flight == stage.full_in_flight for stage in found.stages):
        return found.period_seconds
    replicas = [stage.replicas for stage in found.stages]
    each = math.lcm(*replicas)
    most = max(stage.full_in_flight * stage.replicas for stage in found.stages)
    length = each * (max(20, _LEAST // each) + 4 * (most // each))
    if length * len(replicas) > _MOST_SIMULATED:
        return None
    forward = [
        sum(layer.forward_seconds for layer in profile.layers[stage.first : stage.last + 1]) for stage in found.stages
    ]
    busy = [stage.period_seconds * stage.replicas for stage in found.stages]
    backward = [max(0.0, both - one) for both, one in zip(busy, forward, strict=True)]
    schedule = pipedream(num_ranks=sum(replicas), num_microbatches=length, replicas=replicas)
    simulated = simulate(schedule, Costs.per_stage(forward=forward, backward=backward)).period_seconds
    return None if simulated is None else max(found.period_seconds, simulated)
