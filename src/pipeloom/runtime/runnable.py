"""Refuse what the checker and the simulator know but the executor would run as something else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from pipeloom.errors import InputError
from pipeloom.ir import Schedule, WeightPolicy
from pipeloom.runtime.state import LossFn
from pipeloom.runtime.worker import RUNNABLE_OPS


def check_runnable(schedule: Schedule) -> None:
    """Raises InputError where a legal schedule is more than the executor can do."""
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


def check_slices(schedule: Schedule, lengths: Sequence[int] | None) -> None:
    """Raises InputError where the lengths of slices are not those of the schedule's."""
    if lengths is None:
        return
    if len(lengths) != schedule.num_slices:
        raise InputError(
            f"slices have {len(lengths)} lengths: schedule {schedule.name!r} cuts a sequence into "
            f"{schedule.num_slices}; give one length for each slice, or build the schedule with num_slices"
        )
    if any(length < 1 for length in lengths):
        raise InputError(f"slices of {list(lengths)} tokens: each has at least one; correct them")
