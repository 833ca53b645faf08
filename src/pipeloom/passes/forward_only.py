"""Forward-only schedules for evaluation, and the check that a training schedule has backwards."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Op
from pipeloom.ir.schedule import Schedule, WeightPolicy


def check_has_backwards(schedule: Schedule) -> None:
    """Raises ScheduleError if the schedule has no backwards, so that it cannot train."""
    if schedule.forward_only:
        raise ScheduleError(
            f"schedule {schedule.name!r} has only forwards: training needs all backwards, such as "
            f"{schedule.num_stages - 1}B0. Add them, or use the schedule for evaluation."
        )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` in their order; legal if `schedule` is, because fewer actions add no wait.

    A stream becomes synchronous: without updates there is one version of the parameters.
    """
    orders = tuple(tuple(action for action in order if action.op is Op.F) for order in schedule.orders)
    return replace(
        schedule,
        orders=orders,
        overlapped=frozenset(),
        weights=WeightPolicy.FLUSH,
        microbatches_per_update=None,
        forward_only=True,
    )
