"""Evaluation: the same placement and forward order, without backwards; and that training is none."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Op
from pipeloom.ir.schedule import Schedule, WeightPolicy


def check_has_backwards(schedule: Schedule) -> None:
    """Refuse to train by forwards alone.

    Raises:
        ScheduleError: the schedule has no backwards.
    """
    if schedule.forward_only:
        raise ScheduleError(
            f"schedule {schedule.name!r} has forwards alone: {schedule.num_stages - 1}B0 is missing, and every other "
            "backward; a step needs them: add them, or evaluate"
        )


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` in their order. Legal for every legal schedule: leaving actions out adds no wait.

    Of a stream, too: nothing is updated, so there is one version of the parameters, the newest.
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
