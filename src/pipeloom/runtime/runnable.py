"""Refuse what the checker and the simulator know but the executor would run as something else."""

from __future__ import annotations

from torch import nn

from pipeloom.errors import InputError
from pipeloom.ir import Schedule, WeightPolicy
from pipeloom.runtime.state import LossFn
from pipeloom.runtime.worker import RUNNABLE_OPS


def check_runnable(schedule: Schedule) -> None:
    """Raises InputError where a legal schedule is more than the executor can do."""
    if schedule.num_slices != 1:
        raise InputError(
            f"schedule {schedule.name!r} has {schedule.num_slices} slices a micro-batch: the executor runs whole "
            "micro-batches; take a schedule without slices"
        )
    if schedule.weights is not WeightPolicy.FLUSH:
        raise InputError(
            f"schedule {schedule.name!r} has weight policy {schedule.weights.value!r}: the executor runs 'flush', one "
            "version of the weights; take a synchronous schedule"
        )
    unknown = next((action for _, action in schedule.actions() if action.op not in RUNNABLE_OPS), None)
    if unknown is not None:
        raise InputError(
            f"schedule {schedule.name!r} has {unknown}: the executor runs {', '.join(sorted(RUNNABLE_OPS))}; take a "
            f"schedule without {unknown.op}"
        )


def check_loss(loss_fn: LossFn | None) -> None:
    """Raises InputError where the loss has parameters, which would be in no stage."""
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise InputError(
            "loss_fn is a module with parameters: they would be in no stage; put it at the end of the model, and leave "
            "to loss_fn what has none"
        )
