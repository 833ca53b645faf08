"""A schedule from its orders alone: placement and sizes follow from the forwards."""

from __future__ import annotations

from pipeloom.errors import ScheduleError, listed
from pipeloom.ir.action import Action, Op
from pipeloom.ir.check.input_types import as_orders, check_actions
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Orders, Schedule


def schedule_from_orders(
    orders: Orders, *, name: str, overlapped: frozenset[tuple[Action, Action]] = frozenset()
) -> Schedule:
    """A schedule with these orders. `pipeloom.ir.check` validates that it is legal.

    A stage is placed on the ranks that run its forwards; the first replica is the rank with the lowest micro-batch.
    The highest numbers in the forwards give the numbers of micro-batches and slices.

    Raises:
        ScheduleError: an entry is not an action, stages are not numbered without gaps, or there are no forwards.
    """
    orders = as_orders(orders, f"schedule {name!r}")
    check_actions(orders, f"schedule {name!r}")
    homes: dict[int, dict[int, int]] = {}  # stage -> rank -> lowest micro-batch that the rank runs of it
    microbatches = slices = 0
    for rank, order in enumerate(orders):
        for stage, op, microbatch, piece in order:
            if op is Op.F:
                ranks = homes.setdefault(stage, {})
                ranks[rank] = min(ranks.get(rank, microbatch or 0), microbatch or 0)
                microbatches = max(microbatches, 1 + (microbatch or 0))
                slices = max(slices, 1 + (piece or 0))
    if not homes:
        raise ScheduleError(f"schedule {name!r} has no forwards: every stage must run every micro-batch. Add 0F0.")
    if sorted(homes) != list(range(len(homes))):
        raise ScheduleError(
            f"schedule {name!r} has forwards of stages {listed(sorted(homes))}: stages must be numbered from 0 without "
            "gaps. Renumber them."
        )
    replicas = (sorted(homes[stage], key=lambda rank: homes[stage][rank]) for stage in range(len(homes)))
    return Schedule(
        name=name,
        num_microbatches=microbatches,
        num_slices=max(1, slices),
        placement=Placement(tuple(map(tuple, replicas))),
        orders=orders,
        overlapped=overlapped,
        forward_only=all(action.op is Op.F for order in orders for action in order),
    )
