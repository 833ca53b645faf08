"""The period of a partition whose in-flight minibatches are limited to PipeDream's NOAM."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.plan.partition.pipedream import Partition


def noam_period(found: Partition) -> float:
    """Exact seconds per minibatch in the steady state with NOAM minibatches in flight.

    It exceeds the period of the partition where NOAM is less than `Stage.full_in_flight` and stages wait for each
    other. Gradient synchronisation counts as part of the backward; transfers have no latency.
    """
    stages = found.stages
    busy = [stage.period_seconds * stage.replicas for stage in stages]
    waiting = stream_period(
        busy, replicas=[stage.replicas for stage in stages], in_flight=[stage.in_flight for stage in stages]
    )
    return max(found.period_seconds, waiting)


def stream_period(busy: Sequence[float], *, replicas: Sequence[int], in_flight: Sequence[int]) -> float:
    """Seconds per micro-batch in the steady state of 1F1B without a flush, without messages.

    It is the largest ratio of time to micro-batches over the cycles of the dependency graph. Forward b of stage s waits
    for forward b of stage s - 1 and, on its replica, for backward ``b - n_s r_s`` (n_s in flight on each of r_s
    replicas). Backward b waits for backward b of stage s + 1 and, on its replica, for forward ``b + (n_s - 1) r_s``.
    The dependencies repeat for every b, so a simple cycle goes forward over the stages s..t and backward again:

        max over s <= t of  sum of (F_k + B_k) over k = s..t  /  (n_s r_s - (n_t - 1) r_t)

    (the maximum cycle ratio of a timed event graph: Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity,
    1992). With s = t it is the time of one stage that never waits.

    Args:
        busy: seconds of a forward and a backward on one replica, per stage.
        replicas: replicas per stage; micro-batch b runs on replica ``b mod r``.
        in_flight: in-flight micro-batches per replica of each stage: `noam_in_flight` or `full_in_flight`.
    """
    longest = 0.0
    for first in range(len(busy)):
        around = 0.0
        for last in range(first, len(busy)):
            around += busy[last]
            micro_batches = in_flight[first] * replicas[first] - (in_flight[last] - 1) * replicas[last]
            longest = max(longest, around / micro_batches)
    return longest
