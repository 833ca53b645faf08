"""The schedule of an update of Trainer."""

from typing import Any

from pipeloom import schedules
from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.parallel import Mesh


def make_schedule(
    schedule: str | Schedule, num_microbatches: int | None, mesh: Mesh | None, num_processes: int, args: Any
) -> Schedule:
    """The schedule that a PipelineTrainer runs; for arguments see there.

    Raises:
        InputError: a mesh with other axes than pp and dp, a schedule that updates parameters while it runs or cuts
            sequences, or numbers of micro-batches that do not fit.
    """
    inside = next((axis for axis in ("cp", "tp", "ep") if mesh is not None and mesh.degree(axis) > 1), None)
    if mesh is not None and inside is not None:
        raise InputError(
            f"mesh has {inside}={mesh.degree(inside)}: PipelineTrainer runs on axes pp and dp. Use Pipeline."
        )
    steps = args.gradient_accumulation_steps
    if isinstance(schedule, Schedule):
        if num_microbatches not in (None, schedule.num_microbatches):
            raise InputError(
                f"num_microbatches={num_microbatches}: the schedule has {schedule.num_microbatches}. Remove it."
            )
    elif isinstance(schedule, str):
        ranks = num_processes if mesh is None else mesh.degree("pp")
        if num_microbatches is None:
            num_microbatches = _enough(ranks, steps, args.per_device_train_batch_size)
        schedule = schedules.build(schedule, num_ranks=ranks, num_microbatches=num_microbatches)
    else:
        raise InputError(f"schedule={schedule!r}: must be the name of a schedule, such as '1f1b', or a Schedule.")
    if schedule.microbatches_per_update is not None:
        raise InputError(f"schedule {schedule.name!r} updates parameters while it runs. Use one such as 1f1b.")
    if schedule.num_slices > 1:
        raise InputError(f"schedule {schedule.name!r} cuts sequences. Use one without slices, such as 1f1b.")
    if schedule.num_microbatches % steps:
        raise InputError(
            f"num_microbatches={schedule.num_microbatches}: must be a multiple of gradient_accumulation_steps={steps}, "
            f"the batches of an update. Use {steps * max(1, round(schedule.num_microbatches / steps))}."
        )
    return schedule


def _enough(num_ranks: int, num_batches: int, batch_size: int) -> int:
    """Micro-batches of whole batches, or of parts of them where these are fewer than two per rank."""
    wanted = 2 * num_ranks if num_ranks > 1 else 1
    return num_batches * next((number for number in divisors(batch_size) if number * num_batches >= wanted), batch_size)
