"""The steady state of a stream: how long a micro-batch takes where the pipeline neither fills nor drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.ir.action import Op

if TYPE_CHECKING:
    from pipeloom.sim.timeline import Timeline


def steady_period(timeline: Timeline) -> float | None:
    """Seconds a micro-batch takes in the steady state of a stream; None where the stream is too short for one.

    Start-up and drain stay outside: of the backwards of the input stage that have ended before one of its ranks begins
    its last forward, the later half. That is a whole number of rounds, after which all replicas have had the same turns
    and all stages have updated. In a short stream something of its start may be left in it.
    """
    ranks = timeline.placement.replicas[0]
    ends: dict[int, float] = {}
    last_forward = float("inf")
    for rank in ranks:
        row = [span for span in timeline.compute_spans[rank] if span.action.stage == 0]
        last_forward = min(last_forward, max((start for (_, op, _, _), start, _ in row if op is Op.F), default=0.0))
        ends |= {b: end for (_, op, b, _), _, end in row if op in (Op.B, Op.W) and b is not None}
    full = 0
    while full in ends and ends[full] <= last_forward:
        full += 1
    size = timeline.schedule.update_period
    micro_batches = (full // size + 1) // 2 * size
    if not 0 < micro_batches < full:
        return None
    return (ends[full - 1] - ends[full - 1 - micro_batches]) / micro_batches
