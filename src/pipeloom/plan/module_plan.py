"""`plan_module`: measures the layers of any module, and searches for the fastest way to train it on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, get_args

from pipeloom.common.quantities import seconds_text
from pipeloom.common.random_states import RandomStates
from pipeloom.errors import InputError, folded
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.local.trials import MOST_PLANS
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.plan import Plan
from pipeloom.plan.profiled_costs import WHOLE, ProfiledCosts, Unit, UnitRow, check_whole, together
from pipeloom.plan.search.answer import plan_of, predicted, why_not
from pipeloom.plan.search.best_first import Answer, find_plans
from pipeloom.plan.search.comparison import with_plain
from pipeloom.plan.search.request import (
    MOST_DEVICES,
    MOST_SAMPLES,
    PYTHON,
    Objective,
    Request,
    check_conditions,
    check_offload,
    given_names,
    parse_fixed,
    parse_forbidden,
)
from pipeloom.plan.search.simulated import Simulated

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeloom.split.profile import LossFn

_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def plan_module(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    cluster: str | Cluster,
    global_batch_size: int,
    devices: int | None = None,
    loss_fn: LossFn | None = None,
    layers: Sequence[str] | None = None,
    memory_bytes: float | None = None,
    optimizer: str = "adamw",
    objective: Objective = "time",
    fix: str | Mapping[str, Any] | None = None,
    forbid: str | Sequence[str] | None = None,
    num_rounds: int = 5,
) -> Plan:
    """Measure every layer of a model, and search for the fastest plan on a cluster whose devices are like this one.

    ``pipeloom.plan(...)`` calls this function. The search is that of `pipeloom plan`, over pipeline and data degrees,
    schedule, virtual stages, layers per stage, micro-batches, full recomputation per stage, ZeRO and offload.
    ``pipeloom.Pipeline(model, plan, loss_fn=loss_fn)`` runs the plan.

    A model whose layers are not known (see `model`) is traced with torch.export, and planned without recomputation;
    its plan names the modules at which stages begin. It runs as
    ``pipeloom.Pipeline(model, plan, loss_fn=loss_fn, example=inputs)``.

    Args:
        model: a model that `pipeloom.split.split` cuts into layers: an nn.Sequential, a model with `pipeline_layers`, a
            Hugging Face model with a plan of its own, or a list of modules; or any model that torch.export traces.
        example: inputs of one micro-batch, of the largest size to plan for, samples first; with `loss_fn`, the pair
            (inputs, targets). Layers are measured with all its samples and with half of them.
        cluster: a name such as "dgx-h100", "local", a cluster file, or a `Cluster`.
        global_batch_size: samples per step.
        devices: of the cluster; None: those of one node.
        loss_fn: ``loss_fn(output, targets)``, measured with the last layer.
        layers: names of the layers in order, as for `pipeloom.split.split`.
        memory_bytes: per device; None: 92 % of the memory of the cluster's devices.
        optimizer: a name of `pipeloom memory --optimizers`.
        objective: "time", "memory" or "cost", as ``--objective``.
        fix, forbid: as ``--fix`` and ``--forbid`` of `pipeloom plan`, such as ``"schedule=1f1b,pipeline=4"``; `fix` may
            be a dict, such as ``{"pipeline": 2, "recompute": ["full", "none"]}``, and `forbid` a list of keys.
        num_rounds: measurements whose median counts.

    Raises:
        InputError: no plan fits, an argument is out of range, or an unknown name.
        SplitError: the model can neither be cut into layers nor traced.

    Source: the profile of layers is PipeDream's (arXiv:1806.03377, section 3.1).
    """
    return plans(
        model,
        example,
        cluster=cluster,
        global_batch_size=global_batch_size,
        top=1,
        devices=devices,
        loss_fn=loss_fn,
        layers=layers,
        memory_bytes=memory_bytes,
        optimizer=optimizer,
        objective=objective,
        fix=fix,
        forbid=forbid,
        num_rounds=num_rounds,
    )[0]


def plans(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    cluster: str | Cluster,
    global_batch_size: int,
    top: int = MOST_PLANS,
    devices: int | None = None,
    loss_fn: LossFn | None = None,
    layers: Sequence[str] | None = None,
    memory_bytes: float | None = None,
    optimizer: str = "adamw",
    objective: Objective = "time",
    fix: str | Mapping[str, Any] | None = None,
    forbid: str | Sequence[str] | None = None,
    num_rounds: int = 5,
) -> list[Plan]:
    """The fastest plans of `plan_module`, best first: with other degrees, schedules, chunks or micro-batches each.

    Where none of them is plain, of 1F1B with one stage per rank, the last one is, for `fastest_plan` to compare with.
    ``pipeloom.plans(...)`` calls this function. `pipeloom.fastest_plan` compares them by steps.

    Args:
        top: number of plans; there may be fewer.

    The other arguments and errors are those of `plan_module`.
    """
    fix, forbid = _written(fix, forbid)
    if not isinstance(cluster, str | Cluster):
        raise InputError(f"cluster={folded(cluster)}: must be a name such as 'dgx-h100', or a cluster file.")
    where = find_cluster(cluster, "cluster") if isinstance(cluster, str) else cluster
    count = where.devices_per_node if devices is None else devices
    whole = {"global_batch_size": (global_batch_size, MOST_SAMPLES), "devices": (count, MOST_DEVICES)}
    whole |= {"num_rounds": (num_rounds, MOST_SAMPLES), "top": (top, MOST_SAMPLES)}
    _check_arguments(whole, memory_bytes, optimizer, objective)
    from pipeloom.split.profile import threads_of_a_rank
    from pipeloom.split.stages import knows_layers

    traced = layers is None and not knows_layers(model)
    fixed, forbidden = _constraints(fix, forbid, type(model).__name__ if traced else None)
    _check_example(example, loss_fn)
    threads = threads_of_a_rank(count) if where.measured is not None else nullcontext()  # processes share its cores
    with threads, _same_randomness():
        units, samples, precision = _measured(model, example, layers, loss_fn, num_rounds, count if traced else None)
    costs = ProfiledCosts(units=units, cluster=where)
    check_offload(fixed, where, f"fix={fix}", can_offload=costs.can_offload)
    request = Request(
        devices=count,
        batch_size=global_batch_size,
        memory_bytes=where.usable_bytes(count) if memory_bytes is None else memory_bytes,
        fixed={"precision": precision, **fixed},
        forbidden=forbidden,
        optimizer=optimizer,
        objective=objective,
        top=top,
        ends_alone=False,
        names=PYTHON._replace(given=given_names(fix=fix, forbid=forbid)),
    )
    asked: dict[str, Any] = {"accept": lambda found: why_not(costs, found)}
    answer = find_plans(costs, request, **asked)
    found = with_plain(costs, request, answer.plans, **asked)
    return [_plan(costs, each, samples, answer, units if traced else None) for each in found]


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Layers that draw random numbers while they are measured do not change those that the caller draws behind."""
    import torch

    others, devices = RandomStates.now(), [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        others.restore()


def _plan(costs: ProfiledCosts, found: Simulated, samples: int, answer: Answer, traced: Sequence[Unit] | None) -> Plan:
    """A plan that was found; `traced` are the units of a model that is traced."""
    why = (
        f"{seconds_text(found.step_seconds)} per step predicted from layers measured with up to {samples} samples; "
        f"{answer.considered:,} configurations considered, {answer.simulated:,} simulated."
    )
    plan = plan_of(costs, found.of, found.schedule_limit, why=(why,), **predicted(found))
    return plan if traced is None else replace(plan, cut=_modules_begun(traced, found.of))


def _written(fix: str | Mapping[str, Any] | None, forbid: str | Sequence[str] | None) -> tuple[str | None, str | None]:
    """`fix` and `forbid` as on the command line. Raises InputError for values of other types."""
    if isinstance(fix, Mapping):
        fix = ",".join(f"{key}={_word(value)}" for key, value in fix.items())
    elif fix is not None and not isinstance(fix, str):
        raise InputError(f"fix={folded(fix)}: must be a dict, or text such as 'pipeline=4,schedule=1f1b'.")
    if isinstance(forbid, list | tuple | set | frozenset) and all(isinstance(key, str) for key in forbid):
        forbid = ",".join(forbid)
    elif forbid is not None and not isinstance(forbid, str):
        raise InputError(f"forbid={folded(forbid)}: must be a list of keys, or text such as 'offload,recompute'.")
    return fix, forbid


def _constraints(fix: str | None, forbid: str | None, traced: str | None) -> tuple[dict[str, Any], frozenset[str]]:
    """What plans must have, and what they must not; `traced` is the class of a model that is traced.

    Raises:
        InputError: an unknown key or value, or one of which a profile has no times.
    """
    fixed = parse_fixed(fix, "fix") if fix else {}
    forbidden = parse_forbidden(forbid, "forbid") if forbid else frozenset()
    check_conditions(fixed, forbidden, "fix", f"forbid={forbid}")
    forbidden |= set(WHOLE)
    check_whole(fixed, f"fix={fix}")
    if traced is not None and set(fixed.get("recompute", ())) - {Recompute.NONE}:
        raise InputError(
            f"fix={fix}: {traced} is traced, and stages of a trace recompute as a whole, of which a profile has no "
            "times. Remove recompute, or name the layers: layers=."
        )
    return fixed, forbidden if traced is None else forbidden | {"recompute"}


def _check_arguments(
    whole: Mapping[str, tuple[Any, int]], memory_bytes: float | None, optimizer: str, objective: str
) -> None:
    """Raises InputError for a value out of range; `whole` are integers from 1, with the most."""
    for name, (value, most) in whole.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise InputError(f"{name}={folded(value)}: must be an integer.")
        if not 1 <= int(value) <= most:
            raise InputError(f"{name}={value}: must be at {'least 1' if int(value) < 1 else f'most {most:,}'}.")
    if memory_bytes is not None and not (isinstance(memory_bytes, Real) and float(memory_bytes) > 0):
        raise InputError(f"memory_bytes={folded(memory_bytes)}: must be a number of bytes above 0.")
    for name, word, known in (("optimizer", optimizer, OPTIMIZERS), ("objective", objective, get_args(Objective))):
        if word not in known:
            raise InputError(f"{name}={folded(word)}: must be one of {', '.join(known)}.")


def _check_example(example: Any, loss_fn: LossFn | None) -> None:
    """Raises InputError for an example with a loss that is no pair, or one that is a pair without a loss."""
    pair = isinstance(example, tuple) and len(example) == 2
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(f"loss_fn={folded(loss_fn)}: must be a function loss_fn(output, targets).")
    if loss_fn is not None and not pair:
        raise InputError("example: with loss_fn, it must be the pair (inputs, targets) of one micro-batch.")


def _word(value: Any) -> str:
    """A value as `parse_fixed` reads it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _modules_begun(units: Sequence[Unit], of: Configuration) -> tuple[str, ...] | None:
    """The modules at which the stages after the first begin; None: there is one stage."""
    starts = list(accumulate(of.blocks_of(len(units))))[:-1]
    return tuple(units[start].name for start in starts) or None


def _measured(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    layers: Sequence[str] | None,
    loss_fn: LossFn | None,
    num_rounds: int,
    traced_for: int | None,
) -> tuple[list[Unit], int, str]:
    """The units of a model, the samples of the example, and the number format of the parameters.

    `traced_for` is the number of devices for which the calls of a traced model are many enough; None: no trace.
    """
    from torch import nn

    from pipeloom.split.layer_rows import measure_calls, measure_layers, samples_of

    samples = samples_of(example)
    if traced_for is None:
        options: Any = {"loss_fn": loss_fn, "num_rounds": num_rounds, "split": _input_backward}
        found = measure_layers(model, example, layers=layers, **options)
    else:
        assert isinstance(model, nn.Module)
        found = measure_calls(model, example, num_stages=traced_for, loss_fn=loss_fn, num_rounds=num_rounds)
    groups = [[found[at] for at in unit] for unit in together([layer.counted for layer in found])]
    formats = {dtype for layer in found for dtype in layer.dtypes}
    unknown = formats - set(_FORMATS)
    if unknown or len(formats) > 1:
        raise InputError(
            f"model has parameters of {', '.join(sorted(formats))}: a plan trains in one number format, of "
            f"{', '.join(_FORMATS)}. Convert the model, such as by model.float()."
        )
    return [_unit(group) for group in groups], samples, _FORMATS[formats.pop()] if formats else "fp32"


def _input_backward(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Callable[[], None]:
    """Run I as the runtime does; returns W."""
    from pipeloom.autograd.split_backward import backward_input, root_of

    _, weights = backward_input([root_of(root) for root in roots], gradients, leaves)
    return weights.accumulate


def _unit(group: Sequence[Any]) -> Unit:
    """A counted layer with its neighbours."""
    rows: Mapping[int, UnitRow] = {
        samples: UnitRow(
            forward=sum(layer.rows[samples].forward for layer in group),
            backward=sum(layer.rows[samples].backward for layer in group),
            inputs=sum(layer.rows[samples].inputs for layer in group),
            weights=sum(layer.rows[samples].weights for layer in group),
            again=sum(layer.rows[samples].forward for layer in group if layer.counted),
            sent=group[-1].rows[samples].sent,
            kept=sum(layer.rows[samples].kept for layer in group),
            recomputed=sum(
                min(layer.rows[samples].kept, layer.rows[samples].received)
                if layer.counted
                else layer.rows[samples].kept
                for layer in group
            ),
        )
        for samples in group[0].rows
    }
    return Unit(
        name=next((layer.name for layer in group if layer.counted), group[0].name),
        rows=rows,
        parameters={name: shape for layer in group for name, shape in layer.parameters.items()},
        buffer_elements=sum(layer.buffer_elements for layer in group),
    )
