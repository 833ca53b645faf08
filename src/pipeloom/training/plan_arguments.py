"""The arguments of a `Pipeline` that a `Plan` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pipeloom.errors import InputError, folded
from pipeloom.ir import Schedule
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.options import DataParallel, OffloadActivations, Precision
from pipeloom.plan.plan import Plan
from pipeloom.split import Stages


class PlanArguments(NamedTuple):
    """Arguments of `Pipeline`, by their names there."""

    schedule: Schedule
    cut: str | Sequence[int]
    slices: Sequence[int] | None
    recompute: str | Sequence[str]
    offload: OffloadActivations | None
    mesh: Mesh | None
    data: DataParallel | str | None
    precision: Precision | str | None


def arguments_of_plan(
    plan: Plan,
    model: nn.Module | Sequence[nn.Module] | Stages,
    *,
    cut: str | Sequence[int],
    slices: Sequence[int] | None,
    recompute: str | Sequence[str],
    offload: OffloadActivations | None,
    mesh: Mesh | None,
    data: DataParallel | str | None,
    precision: Precision | str | None,
) -> PlanArguments:
    """What runs `plan`. An argument may repeat what the plan says, and is used where the plan leaves the choice open.

    Optimizer states are not offloaded here: pass the optimizer through `pipeloom.OffloadedOptimizer`.

    Args:
        plan: what to run. A data-parallel degree above 1 without a `mesh` makes one of all processes.
        model: its device decides whether anything moves: on the CPU nothing is offloaded to "cpu".
        cut, slices, recompute, offload, mesh, data, precision: as `Pipeline` takes them.

    Raises:
        InputError: an argument contradicts the plan, or there is no process group for the replicas.
    """
    moves = plan.offload is not None and plan.offload != _device_type(model)
    if plan.cut is not None:
        planned = plan.cut if isinstance(plan.cut, str) else list(plan.cut)
        _agree("cut", cut, planned, usual="layers")
        cut = planned
    if plan.slices is not None:
        _agree("slices", slices, plan.slice_lengths, usual=None)
        slices = plan.slice_lengths
    if plan.recompute is not None:
        same = isinstance(recompute, str) and {recompute} == {*plan.recompute}
        _agree("recompute", recompute, plan.recompute, usual=recompute if same else "none")
        recompute = plan.recompute
    if plan.offload is not None:
        activations = None
        if moves and plan.offload_activations is not None:
            activations = OffloadActivations(plan.offload, plan.offload_activations or None)
        _agree("offload", offload, activations, usual=None)
        offload = activations
    return PlanArguments(
        schedule=plan.make_schedule(),
        cut=cut,
        slices=slices,
        recompute=recompute,
        offload=offload,
        mesh=_mesh(plan, mesh),
        data=_data(plan, data, moves=moves),
        precision=_precision(plan, precision),
    )


def _mesh(plan: Plan, mesh: Mesh | None) -> Mesh | None:
    if mesh is None:
        return None if plan.data == 1 else Mesh(pp=plan.num_ranks, dp=plan.data)
    for axis, degree in (("dp", plan.data), ("pp", plan.num_ranks)):
        if hasattr(mesh, "degree") and mesh.degree(axis) != degree:
            raise InputError(f"mesh has {axis}={mesh.degree(axis)}: the plan has {degree}. Use {axis}={degree}.")
    return mesh


def _data(plan: Plan, data: DataParallel | str | None, *, moves: bool) -> DataParallel | str | None:
    planned = (plan.data_strategy, plan.data_granularity, plan.data_bucket_bytes)
    parameters = plan.offload if moves and plan.offload_parameters else None
    if planned == (None, None, None) and parameters is None:
        return data
    if data is None:
        return replace(plan.data_parallel, offload=parameters)
    given = DataParallel.of(data)
    found = (given.strategy, given.granularity, given.bucket_bytes)
    names = ("data_strategy", "data_granularity", "data_bucket_bytes")
    for name, wanted, value in zip(names, planned, found, strict=True):
        if wanted not in (None, value):
            raise InputError(f"data={folded(data)}: the plan has {name}={wanted}. Remove it, or make a plan with it.")
    if plan.offload is not None and given.offload != parameters:
        raise InputError(f"data={folded(data)}: the plan has offload={parameters}. Remove it, or make a plan with it.")
    return given


def _precision(plan: Plan, precision: Precision | str | None) -> Precision | str | None:
    if plan.precision is None and plan.gradients is None:
        return precision
    if precision is not None:
        given = Precision.of(precision)
        if plan.precision not in (None, given.dtype) or plan.gradients not in (None, given.gradients):
            raise InputError(
                f"precision={folded(precision)}: the plan has precision={plan.precision} and gradients="
                f"{plan.gradients}. Remove precision, or make a plan with it."
            )
        return given
    return plan.number_format


def _agree(name: str, given: Any, planned: Any, *, usual: Any) -> None:
    """Raises InputError where an argument is neither its default nor what the plan has."""
    plain, wanted = (list(each) if isinstance(each, tuple) else each for each in (given, planned))
    if given != usual and plain != wanted:
        raise InputError(f"{name}={folded(given)}: the plan has {name}={wanted}. Remove it, or make a plan with it.")


def _device_type(model: nn.Module | Sequence[nn.Module] | Stages) -> str:
    """The kind of device that holds the parameters of a model."""
    modules = [model] if isinstance(model, nn.Module) else model.modules if isinstance(model, Stages) else list(model)
    return next((p.device.type for module in modules for p in module.parameters()), "cpu")
