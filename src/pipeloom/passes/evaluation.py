"""What a pipeline evaluates with: forwards, of one step or of one update."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.schedule import Schedule, WeightPolicy
from pipeloom.passes.forward_only import forward_only


def evaluation_schedule(schedule: Schedule) -> Schedule:
    """The forwards of one step of `schedule`; of a stream, those of the micro-batches of its first update."""
    count = schedule.microbatches_per_update
    if count is None:
        return forward_only(schedule)
    orders = tuple(
        tuple(action for action in order if action.microbatch is not None and action.microbatch < count)
        for order in schedule.orders
    )
    return replace(
        forward_only(replace(schedule, orders=orders)),
        num_microbatches=count,
        weights=WeightPolicy.FLUSH,
        microbatches_per_update=None,
    )
