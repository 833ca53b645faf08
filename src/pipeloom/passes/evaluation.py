"""The schedule for evaluation: the forwards of one step or of one update."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.schedule import Schedule
from pipeloom.passes.forward_only import forward_only
from pipeloom.passes.stretch import before


def evaluation_schedule(schedule: Schedule) -> Schedule:
    """The forwards of one step of `schedule`; for a stream, of the micro-batches of its first update."""
    forwards, count = forward_only(schedule), schedule.microbatches_per_update
    if count is None:
        return forwards
    return replace(forwards, orders=tuple(before(order, count) for order in forwards.orders), num_microbatches=count)
