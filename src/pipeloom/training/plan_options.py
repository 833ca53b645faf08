"""The options of a `Pipeline` that a `Plan` gives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from pipeloom.errors import InputError, folded
from pipeloom.parallel import DataParallel, Mesh, OffloadActivations, Precision
from pipeloom.parallel.context import ContextKind
from pipeloom.plan.plan import Plan
from pipeloom.split import Stages

Model = nn.Module | Sequence[nn.Module] | Stages


class PipelineOptions(NamedTuple):
    """The arguments of `Pipeline` that a plan may give, by their names there. None: not given."""

    cut: str | Sequence[int] | Sequence[str] | None = None
    slices: Sequence[int] | None = None
    recompute: str | Sequence[str] | None = None
    offload: OffloadActivations | None = None
    mesh: Mesh | None = None
    data: DataParallel | str | None = None
    precision: Precision | str | None = None
    context: ContextKind | None = None


def options_of_plan(plan: Plan, model: Model, given: PipelineOptions) -> PipelineOptions:
    """What runs `plan`. An option may repeat what the plan says, and is used where the plan leaves the choice open.

    Optimizer states are not offloaded here: pass the optimizer through `pipeloom.OffloadedOptimizer`.

    Args:
        plan: what to run. Degrees above 1 without a `mesh` make one of all processes, except a tensor-parallel degree:
            the model was cut with a mesh before.
        model: its device decides whether anything moves: on the CPU nothing is offloaded to "cpu".
        given: the options that `Pipeline` got.

    Raises:
        InputError: an option contradicts the plan, or there is no process group for the replicas.
    """
    modules = [model] if isinstance(model, nn.Module) else model.modules if isinstance(model, Stages) else list(model)
    device = next((p.device.type for module in modules for p in module.parameters()), "cpu")
    moves = plan.offload is not None and plan.offload != device
    planned: dict[str, Any] = {}
    if plan.cut is not None:
        planned["cut"] = plan.cut if isinstance(plan.cut, str) else list(plan.cut)
    if plan.slices is not None:
        planned["slices"] = plan.slice_lengths
    if plan.recompute is not None:
        planned["recompute"] = plan.recompute
    if plan.offload is not None:
        activations = moves and plan.offload_activations is not None
        planned["offload"] = OffloadActivations(plan.offload, plan.offload_activations or None) if activations else None
    if plan.context > 1:
        planned["context"] = plan.context_kind or "ring"
    for name, wanted in planned.items():
        value = getattr(given, name)
        plain, listed = (list(each) if isinstance(each, tuple) else each for each in (value, wanted))
        same = plain == listed or (name == "recompute" and isinstance(value, str) and {value} == {*wanted})
        if value is not None and not same:
            raise InputError(f"{name}={folded(value)}: the plan has {name}={listed}. Remove it, or make a new plan.")
    return given._replace(
        **planned,
        mesh=_mesh(plan, given.mesh),
        data=_data(plan, given.data, moves=moves),
        precision=_precision(plan, given.precision),
    )


def _mesh(plan: Plan, mesh: Mesh | None) -> Mesh | None:
    degrees = {"dp": plan.data, "pp": plan.num_ranks, "cp": plan.context, "tp": plan.tensor, "ep": plan.expert}
    if mesh is None:
        name = "tensor" if plan.tensor > 1 else "expert"
        if plan.tensor > 1 or plan.expert > 1:
            raise InputError(
                f"the plan has {name}={getattr(plan, name)}, and no mesh is given. Cut the model with "
                "pipeloom.parallelize(model, mesh), and pass mesh=."
            )
        if plan.data * plan.context == 1:
            return None
        return Mesh(pp=plan.num_ranks, dp=plan.data, cp=plan.context, order=plan.mesh_order)
    for axis, degree in degrees.items():
        if hasattr(mesh, "degree") and mesh.degree(axis) != degree:
            raise InputError(f"mesh has {axis}={mesh.degree(axis)}: the plan has {degree}. Use {axis}={degree}.")
    if plan.expert > 1 and hasattr(mesh, "shape") and mesh.shape.expert_axes != plan.expert_mesh_axes:
        raise InputError(
            f"mesh has expert_axes={mesh.shape.expert_axes}: the plan has {plan.expert_mesh_axes}. Use those."
        )
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
            raise InputError(f"data={folded(data)}: the plan has {name}={wanted}. Remove it, or make a new plan.")
    if plan.offload is not None and given.offload != parameters:
        raise InputError(f"data={folded(data)}: the plan has offload={parameters}. Remove it, or make a new plan.")
    return given


def _precision(plan: Plan, precision: Precision | str | None) -> Precision | str | None:
    if plan.precision is None and plan.gradients is None:
        return precision
    if precision is not None:
        given = Precision.of(precision)
        if plan.precision not in (None, given.dtype) or plan.gradients not in (None, given.gradients):
            raise InputError(
                f"precision={folded(precision)}: the plan has precision={plan.precision} and gradients="
                f"{plan.gradients}. Remove precision, or make a new plan."
            )
        return given
    return plan.number_format
