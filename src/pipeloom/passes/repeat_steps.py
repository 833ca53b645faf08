"""Consecutive steps without a barrier between them."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule


def repeat_steps(schedule: Schedule, num_steps: int) -> Schedule:
    """The schedule of `num_steps` consecutive steps: every rank starts its next step at the end of the previous one.

    Step k has the micro-batches from ``k * num_microbatches``. The simulation shows how consecutive steps overlap
    without an optimizer barrier (arXiv:2401.10241, section 4).

    Raises:
        ScheduleError: the number of micro-batches is not a multiple of a stage's replicas, so that a micro-batch would
            run on another replica in the next step.
    """
    count = schedule.num_microbatches
    for stage, ranks in enumerate(schedule.placement.replicas):
        if count % len(ranks):
            raise ScheduleError(
                f"num_microbatches={count}: repeated steps need a multiple of the {len(ranks)} replicas of stage "
                f"{stage}. Use a multiple of {len(ranks)}."
            )

    def shifted(action: Action, step: int) -> Action:
        return action if action.microbatch is None else action._replace(microbatch=action.microbatch + step * count)

    steps = range(num_steps)
    return replace(
        schedule,
        num_microbatches=count * num_steps,
        orders=tuple(tuple(shifted(action, step) for step in steps for action in order) for order in schedule.orders),
        overlapped=frozenset((shifted(f, step), shifted(b, step)) for step in steps for f, b in schedule.overlapped),
    )
