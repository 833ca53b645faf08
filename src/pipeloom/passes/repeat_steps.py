"""Several steps one behind the other, without a barrier between them."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action
from pipeloom.ir.schedule import Schedule


def repeat_steps(schedule: Schedule, num_steps: int) -> Schedule:
    """The schedule of `num_steps` steps in a row: every rank starts its next step when it has ended its last.

    Micro-batches count on: step k has those from ``k * num_microbatches``. Simulated, it shows how steps move together
    where the optimizer does not hold ranks back (arXiv:2401.10241, section 4).

    Raises:
        ScheduleError: stages have replicas and the micro-batches do not go around evenly, so that the same micro-batch
            of the next step would run elsewhere.
    """
    count = schedule.num_microbatches
    for stage, ranks in enumerate(schedule.placement.replicas):
        if count % len(ranks):
            raise ScheduleError(
                f"{count} micro-batches on {len(ranks)} replicas of stage {stage}: a step repeats where they divide "
                f"evenly; take a multiple of {len(ranks)}"
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
