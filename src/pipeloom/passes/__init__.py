"""Schedule -> Program, one concern a file: merged backwards, separate units, communication, reduction, updates."""

from __future__ import annotations

from pipeloom.ir.schedule import Program, Schedule
from pipeloom.passes.communication import insert_communication
from pipeloom.passes.gradient_reduction import insert_gradient_reduction

__all__ = [
    "check_has_backwards",
    "evaluation_schedule",
    "forward_only",
    "insert_communication",
    "insert_gradient_reduction",
    "insert_updates",
    "lower",
    "merge_backwards",
    "repeat_steps",
    "separate_units",
    "stretch",
    "warm_up_lengths",
]

from pipeloom.passes.evaluation import evaluation_schedule
from pipeloom.passes.forward_only import check_has_backwards, forward_only
from pipeloom.passes.merge_backwards import merge_backwards
from pipeloom.passes.repeat_steps import repeat_steps
from pipeloom.passes.separate_units import separate_units
from pipeloom.passes.stretch import stretch
from pipeloom.passes.updates import insert_updates
from pipeloom.passes.warm_up import warm_up_lengths


def lower(schedule: Schedule, *, tied_stages: tuple[tuple[int, ...], ...] = ()) -> Program:
    """All passes in their order: the program that the executor runs and the simulator times.

    Args:
        schedule: a legal schedule.
        tied_stages: groups of stages that share parameters (tied embeddings: ``((0, num_stages - 1),)``).
    """
    program = insert_communication(schedule)
    if schedule.microbatches_per_update is not None:
        return insert_updates(program, tied_stages)
    return insert_gradient_reduction(program, tied_stages)
