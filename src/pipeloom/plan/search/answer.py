"""The plans that a search found: as JSON, and as `Plan`. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeloom import schedules
from pipeloom.errors import PipeloomError
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.best_first import Answer
from pipeloom.plan.search.simulated import Simulated
from pipeloom.plan.stage_times import Seconds, StageTimes

_AXES = {"tensor": "tp", "context": "cp", "expert": "ep"}


def row_of(costs: StepCosts, found: Simulated) -> dict[str, Any]:
    """A plan of ``--json``. What only the sizes of a transformer tell is None for a profile."""
    of, step = found.of, found.step_seconds
    inside, operations = of.inside, costs.operations(of)
    peak = _peak(costs.cluster, of)
    return {
        "pipeline": of.pipeline,
        "data": of.data,
        "tensor": inside.tensor,
        "sequence": inside.sequence,
        "context": inside.context,
        "context_kind": inside.context_kind if inside.context > 1 else None,
        "expert": inside.expert,
        "chunks": of.chunks,
        "schedule": of.schedule,
        "microbatches": of.microbatches,
        "microbatch_size": of.microbatch_size,
        "slices": of.slices,
        "recompute": _one_or_all([str(of.recompute_of(stage)) for stage in range(of.stages)]),
        "data_strategy": str(of.strategy),
        "data_granularity": str(of.granularity),
        "offload": of.offload,
        "offload_states": of.offload_states,
        "order": ",".join(of.order),
        "blocks": list(of.blocks_of(costs.num_blocks)),
        "precision": of.precision.dtype,
        "gradients": of.precision.gradients,
        "devices": of.devices,
        "step_seconds": step,
        "bubble_fraction": max(0.0, 1 - found.busy_seconds / (step - found.update_seconds)),
        "samples_per_second": of.batch_size / step,
        "tokens_per_second": None if operations is None else of.batch_size * costs.tokens / step,
        "model_flops_utilization": None if operations is None else operations / step / of.devices / peak,
        "peak_bytes": list(found.peak_bytes),
        "seconds": seconds_of(costs, found),
    }


def _peak(cluster: Cluster, of: Configuration) -> float:
    """Operations per second of a device; of a measured machine the fastest product, by as many processes."""
    rates = cluster.beside(of.devices).rates
    if rates is None:
        return cluster.device.peak(of.element)
    products = rates.products.get("fp32" if of.element > 2 else "bf16") or rates.products["fp32"]
    return max(2 * rows * inner * columns / seconds for rows, inner, columns, seconds in products)


def _one_or_all(words: list[str]) -> Any:
    return words[0] if len(set(words)) == 1 else words


def seconds_of(costs: StepCosts, found: Simulated) -> dict[str, float]:
    """Where the time of a step goes: means over the ranks, which add up to the step.

    `pipeline` is all time in which a rank waits for others: the bubble and exposed messages. `data` is the part of the
    step that is not there where data parallelism communicates in no time. `tensor`, `context` and `expert` are
    collectives inside computations, without what computations hide.
    """
    of = found.of
    plain = of._replace(recompute=Recompute.NONE)
    work, without = (sum(map(sum, costs.stage_seconds(each))) for each in (of, plain))
    scale = found.busy_seconds / max(work, 1e-30)
    inside = {axis: scale * _collective_seconds(costs, plain, axis) for axis in _AXES}
    recompute = scale * (work - without)
    busy = min(found.busy_seconds, found.step_seconds - found.update_seconds)
    waits = found.step_seconds - found.update_seconds - busy
    data = max(0.0, found.makespan - found.step.without_replicas()) if of.replicas > 1 else 0.0
    data = min(data, waits)  # on measured machines, processes that exchange compute more slowly meanwhile
    return {
        "compute": busy - recompute - sum(inside.values()),
        "recompute": recompute,
        **inside,
        "pipeline": waits - data,
        "data": data,
        "optimizer": found.update_seconds,
    }


def _collective_seconds(costs: StepCosts, of: Configuration, axis: str) -> float:
    """Seconds of one micro-batch, all stages together, that are not there without the collectives of an axis."""
    if getattr(of.inside, axis) == 1 or not isinstance(costs, CostModel):
        return 0.0
    times = costs.times(of, Recompute.NONE)
    with_links, without = (replace(times, free=frozenset(names)) for names in ((), (_AXES[axis],)))
    kinds = [costs.model.has_experts(block) for block in range(costs.num_blocks)]

    def total(each: StageTimes) -> float:
        parts: list[Seconds] = [each.embedding(), each.head()]
        blocks = {experts: float(sum(each.block(experts=experts))) for experts in set(kinds)}
        return float(sum(map(sum, parts))) + sum(blocks[experts] for experts in kinds)

    return max(0.0, total(with_links) - total(without))


def plan_of(costs: StepCosts, of: Configuration, schedule_limit: float | None = None, **others: Any) -> Plan:
    """The plan that `pipeloom train --plan` runs.

    Args:
        costs: of the model on its cluster.
        of: the configuration.
        schedule_limit: see `Simulated`.
        others: attributes of the plan that do not follow.

    Raises:
        InputError, ScheduleError: the runtime does not support it.
    """
    inside, shares = of.inside, of.replicas > 1
    built = schedules.find(of.schedule).to_measure  # for these costs: its orders are the plan's
    return Plan(
        schedule=costs.schedule(of, schedule_limit) if built else of.schedule,
        pipeline=of.pipeline,
        microbatches=of.microbatches,
        data=of.data,
        virtual_stages=of.chunks,
        batch_size=of.batch_size,
        cut=tuple(of.blocks_of(costs.num_blocks)),
        slices=of.slices if of.slices > 1 else None,
        recompute=tuple(str(of.recompute_of(stage)) for stage in range(of.stages)),
        data_strategy=str(of.strategy) if shares else None,
        data_granularity=str(of.granularity) if shares and of.strategy.shards_gradients else None,
        tensor=inside.tensor,
        sequence=inside.sequence,
        context=inside.context,
        context_kind=inside.context_kind if inside.context > 1 else None,
        expert=inside.expert,
        precision=of.precision.dtype,
        gradients=None if of.precision.gradients == "float32" else of.precision.gradients,
        order=None if usual_order(of) else ",".join(of.order),
        offload="cpu" if of.offload is not None or of.offload_states else None,
        offload_states=of.offload_states,
        offload_activations=of.offload,
        **others,
    )


def why_not(costs: StepCosts, found: Simulated) -> str | None:
    """Why the rules of plans exclude one; None: they do not."""
    try:
        plan_of(costs, found.of, found.schedule_limit)
    except PipeloomError as error:
        return str(error)
    return None


def predicted(found: Simulated) -> dict[str, Any]:
    """The attributes of a plan that predict its step."""
    return {"predicted_step_seconds": found.step_seconds, "predicted_memory_bytes": found.peak_bytes}


def usual_order(of: Configuration) -> bool:
    """Whether devices are where the default order of mesh axes has them."""
    degrees = {"dp": of.data, "pp": of.pipeline, "cp": of.inside.context, "tp": of.inside.tensor}
    own, usual = ([axis for axis in order if degrees[axis] > 1] for order in (of.order, ORDER))
    return own == usual


def json_of(answer: Answer, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "plans": list(rows),
        "refused": answer.refused,
        "considered": answer.considered,
        "simulated": answer.simulated,
        "search_seconds": answer.seconds,
    }
