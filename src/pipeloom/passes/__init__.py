"""Passes from `Schedule` to `Program`: merged backwards, communication, data parallelism, offload, updates."""

from collections.abc import Sequence

from pipeloom.errors import ScheduleError
from pipeloom.ir.check.checker import explained
from pipeloom.ir.data_axis import DataAxis
from pipeloom.ir.schedule import Program, Schedule, schedule_of
from pipeloom.ir.skips import Skip
from pipeloom.passes.communication import insert_communication, warm_up_lengths
from pipeloom.passes.data_parallel import insert_data_parallel
from pipeloom.passes.offload import insert_offload
from pipeloom.passes.rewrites import (
    check_has_backwards,
    evaluation_schedule,
    forward_only,
    merge_backwards,
    repeat_steps,
    separate_units,
    stretch,
)
from pipeloom.passes.updates import insert_gradient_reduction, insert_updates

__all__ = [
    "check_has_backwards",
    "evaluation_schedule",
    "forward_only",
    "insert_communication",
    "insert_data_parallel",
    "insert_gradient_reduction",
    "insert_offload",
    "insert_updates",
    "lower",
    "merge_backwards",
    "repeat_steps",
    "separate_units",
    "stretch",
    "warm_up_lengths",
]


def lower(
    schedule: Schedule,
    *,
    tied_stages: tuple[tuple[int, ...], ...] = (),
    data: DataAxis | None = None,
    skips: Sequence[Skip] = (),
) -> Program:
    """All passes in their order: the program that the executor runs and the simulator times.

    Args:
        schedule: a legal schedule.
        tied_stages: groups of stages that share parameters (tied embeddings: ``((0, num_stages - 1),)``).
        data: the data axis, if there are several data-parallel replicas.
        skips: the pairs of stages between which values skip stages.

    Raises:
        ScheduleError: a data axis or skips for a schedule that updates parameters while it runs, or skips for one with
            slices.
    """
    with explained(schedule_of(schedule)):
        if skips and (schedule.num_slices > 1 or schedule.microbatches_per_update is not None):
            kind = "slices" if schedule.num_slices > 1 else "updates inside"
            raise ScheduleError(
                f"schedule {schedule.name!r} has {kind}, which values that skip stages do not support. Use a "
                "synchronous schedule of whole sequences, such as 1f1b."
            )
        program = insert_communication(schedule, skips)
        if schedule.microbatches_per_update is None:
            if data is not None:
                program = insert_data_parallel(program, data)
            return insert_gradient_reduction(program, tied_stages)
        if data is not None:
            raise ScheduleError(
                f"data axis of degree {data.degree} with schedule {schedule.name!r}: data parallelism needs a "
                "synchronous schedule. Use one, such as 1f1b, or replicate stages with `replicas`."
            )
        return insert_updates(program, tied_stages)
