"""The steady state of a stream: its seconds per micro-batch."""

from collections.abc import Sequence

from pipeloom.ir import Op, Schedule
from pipeloom.sim.spans import Span


def steady_period(schedule: Schedule, compute_spans: Sequence[Sequence[Span]]) -> float | None:
    """Seconds per micro-batch in the steady state of a stream; None where the stream is too short for one.

    Warm-up and cool-down are left out. Of the backwards of the input stage that end before one of its ranks begins its
    last forward, the later half is measured. That is an integer number of update periods, in which all replicas have
    had the same number of turns. In a short stream the measured half may still contain a part of the warm-up.

    Args:
        schedule: of the stream.
        compute_spans: for each rank, the spans of its computations.
    """
    ranks = schedule.placement.replicas[0]
    ends: dict[int, float] = {}
    last_forward = float("inf")
    for rank in ranks:
        row = [span for span in compute_spans[rank] if span.action.stage == 0]
        last_forward = min(last_forward, max((start for (_, op, _, _), start, _ in row if op is Op.F), default=0.0))
        ends |= {b: end for (_, op, b, _), _, end in row if op in (Op.B, Op.W) and b is not None}
    full = 0
    while full in ends and ends[full] <= last_forward:
        full += 1
    size = schedule.update_period
    micro_batches = (full // size + 1) // 2 * size
    if not 0 < micro_batches < full:
        return None
    return (ends[full - 1] - ends[full - 1 - micro_batches]) / micro_batches
