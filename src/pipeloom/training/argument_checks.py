"""Refuse what the checker and the simulator know but the executor would run as something else."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.worker import RUNNABLE_OPS
from pipeloom.errors import InputError
from pipeloom.ir import Schedule, check
from pipeloom.ir.recompute import Recompute, recompute_of_stages
from pipeloom.split.module import StageModule


def check_runnable(schedule: Schedule) -> None:
    """Raises InputError where there is no schedule, or a legal one is more than the executor can do."""
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule is {schedule!r}: a Pipeline runs a Schedule; make one, for example with "
            "pipeloom.schedules.build('1f1b', num_ranks=2, num_microbatches=8)"
        )
    check(schedule)
    unknown = next((action for _, action in schedule.actions() if action.op not in RUNNABLE_OPS), None)
    if unknown is not None:
        raise InputError(
            f"schedule {schedule.name!r} has {unknown}: the executor runs {', '.join(sorted(RUNNABLE_OPS))}; take a "
            f"schedule without {unknown.op}"
        )


def check_loss(loss_fn: LossFn | None) -> None:
    """Raises InputError where the loss is no function, or has parameters, which would be in no stage."""
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn is {loss_fn!r}: it is called as loss_fn(output, targets); pass a function")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise InputError(f"loss_fn is the class {loss_fn.__name__}: an object of it is called; make one")
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise InputError(
            "loss_fn is a module with parameters: they would be in no stage; put it at the end of the model, and leave "
            "to loss_fn what has none"
        )


def check_surroundings(offload: object, mesh: object, timeout_seconds: object) -> None:
    """Raises InputError where one of these is of another kind than a Pipeline takes."""
    if offload is not None and (isinstance(offload, type) or not hasattr(offload, "insert")):
        raise InputError(
            f"offload is {offload!r}: it says where activations go; pass pipeloom.OffloadActivations('cpu'), or none"
        )
    if mesh is not None and (isinstance(mesh, type) or not hasattr(mesh, "coordinate")):
        raise InputError(f"mesh is {mesh!r}: it is a pipeloom.Mesh with the axes pp and dp; make one")
    number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if not number or not 0 < float(timeout_seconds) < math.inf:  # type: ignore[arg-type]
        raise InputError(f"timeout_seconds is {timeout_seconds!r}: it is a finite number above 0; correct it")


def check_recompute(given: str | Sequence[str], num_stages: int, transport: object) -> tuple[Recompute, ...]:
    """What each stage recomputes. Raises InputError where that is not said well, or ranks are threads."""
    kinds = recompute_of_stages(given, num_stages)
    if transport == "threads" and any(kind is not Recompute.NONE for kind in kinds):
        raise InputError(
            f"recompute {given!r} with transport 'threads': a recomputation sets the process's random numbers back, "
            "and other threads draw from them; take transport 'loopback', or processes"
        )
    return kinds


def check_attention(modules: Sequence[nn.Module], kinds: Sequence[Recompute]) -> None:
    """Raises InputError where a stage is to recompute attention and surely has none: all of it is torch's own modules.

    Whether others call attention shows when they run.
    """
    for stage, (module, kind) in enumerate(zip(modules, kinds, strict=True)):
        if kind is Recompute.SELECTIVE and all(map(_has_no_attention, module.modules())):
            raise InputError(
                f"recompute 'selective' for stage {stage}, which has no attention: it is that what is computed again; "
                "take 'full' or 'none' for this stage"
            )


def _has_no_attention(part: nn.Module) -> bool:
    """Of the module itself, whatever is inside of it."""
    known = type(part).__module__.startswith("torch.nn.modules.") or isinstance(part, StageModule)
    hooked = part._forward_hooks or part._forward_pre_hooks
    return known and not hooked and not isinstance(part, nn.MultiheadAttention)


def check_slices(schedule: Schedule, lengths: Sequence[int] | None) -> None:
    """Raises InputError where the lengths of slices are not those of the schedule's."""
    if lengths is None:
        return
    if schedule.microbatches_per_update is not None:
        raise InputError(f"slices under schedule {schedule.name!r}: a stream runs whole sequences; leave slices out")
    if not isinstance(lengths, Sequence) or isinstance(lengths, str) or any(type(each) is not int for each in lengths):
        raise InputError(f"slices are {lengths!r}: they are the tokens of each slice; pass a list such as [48, 40, 40]")
    if len(lengths) != schedule.num_slices:
        raise InputError(
            f"slices have {len(lengths)} lengths: schedule {schedule.name!r} cuts a sequence into "
            f"{schedule.num_slices}; give one length for each slice, or build the schedule with num_slices"
        )
    if any(length < 1 for length in lengths):
        raise InputError(f"slices of {list(lengths)} tokens: each has at least one; correct them")
