"""Validates the arguments of `Pipeline`, before anything communicates."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.worker import RUNNABLE_OPS
from pipeloom.errors import InputError
from pipeloom.ir import Schedule, check
from pipeloom.ir.recompute import Recompute, recompute_of_stages
from pipeloom.parallel import Mesh, OffloadActivations
from pipeloom.parallel.context import KINDS, ContextKind, ContextParallel
from pipeloom.parallel.placed import Place, placed_block
from pipeloom.passes import check_has_backwards
from pipeloom.processes.members import thread_members
from pipeloom.split.stage_module import StageModule
from pipeloom.transport.interface import OneProcessTransport, Transport


def check_arguments(
    schedule: Schedule,
    loss_fn: LossFn | None,
    slices: Sequence[int] | None,
    offload: OffloadActivations | None,
    mesh: Mesh | None,
    timeout_seconds: float,
) -> None:
    """Raises InputError where an argument is of the wrong kind, or the executor cannot run the schedule."""
    if not isinstance(schedule, Schedule):
        raise InputError(
            f"schedule={schedule!r}: must be a Schedule or a Plan. Make one with pipeloom.schedules.build('1f1b', "
            "num_ranks=2, num_microbatches=8), or read a plan with pipeloom.Plan.load('plan.json')."
        )
    check(schedule)
    unknown = next((action for _, action in schedule.actions() if action.op not in RUNNABLE_OPS), None)
    if unknown is not None:
        raise InputError(
            f"schedule {schedule.name!r} has {unknown}: the executor runs {', '.join(sorted(RUNNABLE_OPS))}. Use a "
            f"schedule without {unknown.op}."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn={loss_fn!r}: must be a function, called as loss_fn(output, targets).")
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise InputError(
            f"loss_fn={loss_fn.__name__}: is a class, and must be a function or an instance. Pass {loss_fn.__name__}()."
        )
    if isinstance(loss_fn, nn.Module) and any(p.requires_grad for p in loss_fn.parameters()):
        raise InputError(
            "loss_fn is a module with parameters, which no stage would train. Put layers with parameters at the end of "
            "the model, and keep only the rest in loss_fn."
        )
    if offload is not None and (isinstance(offload, type) or not hasattr(offload, "insert")):
        raise InputError(
            f"offload={offload!r}: must be a pipeloom.OffloadActivations, such as OffloadActivations('cpu')."
        )
    if mesh is not None and (isinstance(mesh, type) or not hasattr(mesh, "coordinate")):
        raise InputError(f"mesh={mesh!r}: must be a pipeloom.Mesh, such as Mesh(pp=2, dp=2).")
    number = isinstance(timeout_seconds, int | float) and not isinstance(timeout_seconds, bool)
    if not number or not 0 < float(timeout_seconds) < math.inf:
        raise InputError(f"timeout_seconds={timeout_seconds!r}: must be a finite number above 0.")
    _check_slices(schedule, slices)


def check_graphs(schedule: Schedule, options: Any, transport: str | Transport) -> None:
    """Raises InputError where the actions of a pipeline with these `PipelineOptions` cannot be recorded as graphs."""
    threads = transport == "threads" or (isinstance(transport, OneProcessTransport) and transport.blocking)
    degrees = {} if options.mesh is None else {axis: options.mesh.degree(axis) for axis in ("dp", "cp", "tp")}
    found = {
        f"{schedule.num_slices} slices": schedule.num_slices > 1 or options.slices is not None,
        "transport='threads'": threads,
        "offload": options.offload is not None,
        "data": options.data is not None,
        "precision": options.precision is not None,
        "a mesh with several processes per stage": any(degree > 1 for degree in degrees.values()),
        f"schedule {schedule.name!r}, whose updates come in the middle": schedule.microbatches_per_update is not None,
    }
    if (reason := next((name for name, is_so in found.items() if is_so), None)) is not None:
        raise InputError(
            f"graphs=True with {reason}: forwards and backwards are recorded where one process computes a whole stage "
            "of whole micro-batches. Remove one of them."
        )


def check_placed(mesh: Mesh | None, modules: Sequence[nn.Module], *, is_whole: bool) -> None:
    """Validate that the parameters of a model lie on the ranks of the mesh that share its stages and experts.

    Args:
        mesh: of all processes.
        modules: the stages.
        is_whole: whether this process has all of them; else some may be placeholders, and all processes call this.

    Raises:
        InputError: there are several ranks and no parameter lies on them, or a parameter lies on those of another mesh.
    """
    blocks = list(filter(None, (placed_block(parameter) for module in modules for parameter in module.parameters())))
    for block in blocks:
        place = Place({"tp": 0}, {"tp": 1}) if mesh is None else mesh.place
        if "ep" in block.place.degrees:
            place = Place({"ep": 0, "tp": 0}, {"ep": 1, "tp": 1}) if mesh is None else mesh.expert_place
        if block.place != place:
            raise InputError(
                f"mesh={mesh}: the model was cut for place {_text(block.place)}, and this mesh has {_text(place)} "
                "for this process. Pass the mesh of pipeloom.parallelize to Pipeline."
            )
    if mesh is None:
        return
    # Any parameter with a place counts for tp: grids cut along parts of it.
    cut_along = {"tp": bool(blocks), "ep": any("ep" in block.how.axes for block in blocks)}
    if not is_whole and max(mesh.degree(axis) for axis in cut_along) > 1:  # the stages of other ranks may be cut
        found = mesh.members.gather(bytes(cut_along.values()))
        cut_along = {axis: any(row[place] for row in found) for place, axis in enumerate(cut_along)}
    if mesh.degree("tp") > 1 and not cut_along["tp"]:
        raise InputError(
            f"mesh={mesh}: no parameter of the model is cut along tp, so all tensor-parallel ranks would do the same "
            "work. Call pipeloom.parallelize(model, mesh, plan) first, or give tp degree 1."
        )
    if mesh.degree("ep") > 1 and not cut_along["ep"]:
        raise InputError(
            f"mesh={mesh}: no experts of the model are cut along ep. Call pipeloom.parallelize(model, mesh) first, or "
            "give ep degree 1."
        )


def _text(place: Place) -> str:
    return ", ".join(f"{axis} {place.coordinates[axis]} of {degree}" for axis, degree in place.degrees.items())


def context_of(
    mesh: Mesh | None, kind: ContextKind | None, schedule: Schedule, *, sliced: bool
) -> ContextParallel | None:
    """How the ranks along axis cp share sequences; None: they do not. Every process calls it.

    Args:
        kind: as given; None: "ring" where the mesh has several ranks along cp.
        sliced: whether sequences are cut into slices.

    Raises:
        InputError: an unknown kind, no mesh, slices, or a schedule that updates parameters while it runs.
    """
    if kind is None and (mesh is None or mesh.degree("cp") == 1):
        return None
    if kind is not None and kind not in KINDS:
        raise InputError(f"context={kind!r}: must be one of {', '.join(KINDS)}.")
    if mesh is None:
        raise InputError(f"context={kind!r} needs a mesh with an axis cp. Pass mesh=pipeloom.Mesh(pp=2, cp=2).")
    if sliced:
        raise InputError(
            f"slices with context parallelism (cp={mesh.degree('cp')}): both cut the sequence, and attention supports "
            "one of them. Use a schedule without slices, or cp=1."
        )
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"schedule {schedule.name!r} updates parameters while it runs: context parallelism needs a synchronous "
            "schedule. Use a schedule such as 1f1b, or cp=1."
        )
    return ContextParallel(mesh.axis("cp"), kind or "ring")


def check_recompute(
    given: str | Sequence[str], schedule: Schedule, transport: object, modules: Sequence[nn.Module], *, sliced: bool
) -> tuple[Recompute, ...]:
    """What each stage recomputes.

    Args:
        modules: all stages of the model; empty where some are placeholders.
        sliced: whether dropout draws its masks by token, from generators of its own.

    Raises:
        InputError: an unknown name, another number of stages, ranks that are threads (in those of
            `pipeloom.run_threads`: with dropout), or "selective" for a stage that
            certainly has no attention: all its modules are torch's own.
    """
    kinds = recompute_of_stages(given, schedule.num_stages)
    threads = transport == "threads" or (isinstance(transport, OneProcessTransport) and transport.blocking)
    if threads and any(kind is not Recompute.NONE for kind in kinds):
        raise InputError(
            f"recompute={given!r} does not work with ranks that are threads: recomputation resets the process's random "
            "generators, from which other threads draw. Use transport='loopback', or processes."
        )
    parts = [part for module in modules for part in module.modules()]
    draws = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
    in_threads = thread_members() is not None and any(kind is not Recompute.NONE for kind in kinds)
    if in_threads and any(getattr(part, "draws_random_numbers", False) for part in parts):
        raise InputError(
            f"recompute={given!r} with a router that draws random numbers does not work in threads of run_threads, "
            "which share one random generator: a recomputed choice would be another one. Use processes, or router topk."
        )
    if in_threads and draws and not sliced:
        raise InputError(
            f"recompute={given!r} with dropout does not work in threads of run_threads, which share one random "
            "generator: a recomputed mask would be another one. Pass slices=[tokens] to Pipeline, or use processes."
        )
    for stage, (module, kind) in enumerate(zip(modules, kinds, strict=False)):
        if kind is Recompute.SELECTIVE and all(map(_has_no_attention, module.modules())):
            raise InputError(
                f"recompute='selective' for stage {stage}: the stage has no attention to recompute. Use 'full' or "
                "'none' for this stage."
            )
    return kinds


def _has_no_attention(part: nn.Module) -> bool:
    """Whether the module itself calls no attention; its submodules are checked separately."""
    known = type(part).__module__.startswith("torch.nn.modules.") or isinstance(part, StageModule)
    hooked = part._forward_hooks or part._forward_pre_hooks
    return known and not hooked and not isinstance(part, nn.MultiheadAttention)


def _check_slices(schedule: Schedule, lengths: Sequence[int] | None) -> None:
    if lengths is None:
        return
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"`slices` does not work with schedule {schedule.name!r}, which runs whole sequences. Remove `slices`."
        )
    if not isinstance(lengths, Sequence) or isinstance(lengths, str) or any(type(each) is not int for each in lengths):
        raise InputError(
            f"slices={lengths!r}: must be a list with the number of tokens of each slice, such as [48, 40, 40]."
        )
    if len(lengths) != schedule.num_slices:
        raise InputError(
            f"slices={list(lengths)} has {len(lengths)} lengths: schedule {schedule.name!r} has {schedule.num_slices} "
            "slices. Give one length per slice, or build the schedule with another num_slices."
        )
    if any(length < 1 for length in lengths):
        raise InputError(f"slices={list(lengths)}: each slice needs at least one token.")


def check_trains(schedule: Schedule, loss_fn: LossFn | None) -> None:
    """Raises InputError where `step` cannot compute gradients."""
    if loss_fn is None:
        raise InputError(
            "step() needs a loss: pass loss_fn to Pipeline. A model of transformers computes its own from whole "
            "sequences, not with slices, context or sequence parallelism; a traced model returns its own where it has "
            "an example with its labels."
        )
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"step() does not run schedule {schedule.name!r}, which updates parameters while it runs. Give the "
            "pipeline and the optimizer to pipeloom.Stream and call its run()."
        )
    check_has_backwards(schedule)
    if not torch.is_grad_enabled():
        raise InputError("step() computes gradients, and they are disabled. Call it outside torch.no_grad().")
