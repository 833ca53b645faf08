"""What a partition gives up where no more minibatches are in flight than PipeDream's NOAM."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.plan.partition.pipedream import Partition


def noam_period(found: Partition) -> float:
    """Seconds of a minibatch in the steady state with NOAM in flight, exactly.

    Stages may wait for each other where NOAM is less than `Stage.full_in_flight`; elsewhere it is the period of the
    partition. Synchronising counts as a part of the backward; a transfer takes its turn beside the others, and no time
    on the way.
    """
    stages = found.stages
    busy = [stage.period_seconds * stage.replicas for stage in stages]
    waiting = stream_period(
        busy, replicas=[stage.replicas for stage in stages], in_flight=[stage.in_flight for stage in stages]
    )
    return max(found.period_seconds, waiting)


def stream_period(busy: Sequence[float], *, replicas: Sequence[int], in_flight: Sequence[int]) -> float:
    """Seconds of a micro-batch in the steady state of 1F1B without a flush, messages aside.

    The largest ratio of time to micro-batches over the cycles of what waits for what. Forward b of stage s waits for
    that of stage s - 1 and, on its replica, for backward ``b - n_s r_s`` (n_s in flight on each of r_s replicas);
    backward b for that of stage s + 1 and, on its replica, for forward ``b + (n_s - 1) r_s``. All of this is the same
    for every b, so a cycle without a repetition goes forward over the stages s..t and backward again:

        max over s <= t of  sum of (F_k + B_k) over k = s..t  /  (n_s r_s - (n_t - 1) r_t)

    (the maximum cycle ratio of a timed event graph: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity,
    1992). With s = t it is what one stage takes when it never waits.

    Args:
        busy: seconds that a replica of each stage takes for the forward and the backward of a micro-batch.
        replicas: of each stage; micro-batch b runs on replica ``b mod r``.
        in_flight: micro-batches on one replica of each stage: `noam_in_flight`, or `full_in_flight`.
    """
    longest = 0.0
    for first in range(len(busy)):
        around = 0.0
        for last in range(first, len(busy)):
            around += busy[last]
            micro_batches = in_flight[first] * replicas[first] - (in_flight[last] - 1) * replicas[last]
            longest = max(longest, around / micro_batches)
    return longest
