"""The plans that a search found: as JSON, as `Plan`, and in words. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.common.quantities import bytes_text, number_text, percent_text, seconds_text, table_lines
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.best_first import Answer
from pipeloom.plan.search.simulated import Simulated

_PARTS = ("compute", "recompute", "tensor", "context", "expert", "pipeline", "data", "optimizer")


def row_of(costs: CostModel, found: Simulated) -> dict[str, Any]:
    """A plan of ``--json``."""
    of, step = found.of, found.step_seconds
    inside = of.inside
    tokens = of.batch_size * costs.tokens
    peak = costs.cluster.device.peak(of.element)
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
        "order": ",".join(of.order),
        "blocks": of.blocks_of(costs.num_blocks),
        "precision": of.precision.dtype,
        "devices": of.devices,
        "step_seconds": step,
        "bubble_fraction": max(0.0, 1 - found.busy_seconds / (step - found.update_seconds)),
        "tokens_per_second": tokens / step,
        "model_flops_utilization": costs.operations(of) / step / of.devices / peak,
        "peak_bytes": list(found.peak_bytes),
        "seconds": seconds_of(costs, found),
    }


def _one_or_all(words: list[str]) -> Any:
    return words[0] if len(set(words)) == 1 else words


def seconds_of(costs: CostModel, found: Simulated) -> dict[str, float]:
    """Where the time of a step goes: means over the ranks, which add up to the step.

    `pipeline` is all time in which a rank waits for others: the bubble and exposed messages. `data` is the part of the
    step that is not there with one replica.
    """
    of = found.of
    per_step = of.microbatches / of.pipeline
    copies = found.busy_seconds / max(per_step * _work(costs, of), 1e-30)  # a stage may be on two ranks
    scale = per_step * copies
    inside = {axis: scale * seconds for axis, seconds in _collectives(costs, of).items()}
    plain = replace(of, recompute=Recompute.NONE)
    recompute = scale * (_work(costs, of) - _work(costs, plain))
    compute = found.busy_seconds - recompute - sum(inside.values())
    data = found.data_seconds
    pipeline = found.step_seconds - found.update_seconds - found.busy_seconds - data
    parts = {"compute": compute, "recompute": recompute, **inside, "pipeline": pipeline, "data": data}
    return {**{name: parts[name] for name in _PARTS if name in parts}, "optimizer": found.update_seconds}


def _work(costs: CostModel, of: Configuration) -> float:
    """Seconds of one micro-batch on all stages."""
    return sum(map(sum, costs.stage_seconds(of)))


def _collectives(costs: CostModel, of: Configuration) -> dict[str, float]:
    """Seconds of one micro-batch that are not there without the collectives of an axis, all stages together."""
    found = {}
    of = replace(of, recompute=Recompute.NONE)
    whole = _work(costs, of)
    for axis in ("tensor", "context", "expert"):
        degree = getattr(of.inside, axis)
        found[axis] = 0.0 if degree == 1 else max(0.0, whole - costs.work_without(of, axis))
    return found


def plan_of(costs: CostModel, found: Simulated, why: Sequence[str]) -> Plan:
    """The plan that `pipeloom train --plan` runs.

    Raises:
        InputError, ScheduleError: the runtime does not support it.
    """
    of = found.of
    inside: InsideStage = of.inside
    kinds = tuple(str(of.recompute_of(stage)) for stage in range(of.stages))
    shares = of.replicas > 1
    order = ",".join(of.order)
    return Plan(
        schedule=of.schedule,
        pipeline=of.pipeline,
        microbatches=of.microbatches,
        data=of.data,
        virtual_stages=of.chunks,
        batch_size=of.batch_size,
        cut=tuple(of.blocks_of(costs.num_blocks)),
        slices=of.slices if of.slices > 1 else None,
        recompute=kinds,
        data_strategy=str(of.strategy) if shares else None,
        data_granularity=str(of.granularity) if shares and of.strategy.shards_gradients else None,
        tensor=inside.tensor,
        sequence=inside.sequence,
        context=inside.context,
        context_kind=inside.context_kind if inside.context > 1 else None,
        expert=inside.expert,
        precision=of.precision.dtype,
        order=None if of.order == ORDER else order,
        offload="cpu" if of.offload is not None else None,
        offload_activations=of.offload,
        predicted_step_seconds=found.step_seconds,
        predicted_memory_bytes=found.peak_bytes,
        why=tuple(why),
    )


def json_of(costs: CostModel, answer: Answer) -> dict[str, Any]:
    """All of ``--json``."""
    return {
        "plans": [row_of(costs, found) for found in answer.plans],
        "refused": answer.refused,
        "considered": answer.considered,
        "simulated": answer.simulated,
        "search_seconds": answer.seconds,
    }


def words_of(costs: CostModel, answer: Answer, rows: Sequence[Mapping[str, Any]], memory: float) -> list[str]:
    """The answer for people: a table, where the time goes, and what would be faster."""
    cells = [["", "pp", "dp", "tp", "cp", "ep", "schedule", "micro-batches", "recompute", "data", "step", "MFU", "peak"]]
    for number, row in enumerate(rows, 1):
        chunks = f" x{row['chunks']}" if row["chunks"] > 1 else ""
        slices = f", {row['slices']} slices" if row["slices"] > 1 else ""
        recompute = row["recompute"] if isinstance(row["recompute"], str) else "mixed"
        cells.append(
            [
                str(number),
                *(str(row[name]) for name in ("pipeline", "data")),
                f"{row['tensor']}{'+sp' if row['sequence'] else ''}",
                *(str(row[name]) for name in ("context", "expert")),
                f"{row['schedule']}{chunks}{slices}",
                f"{row['microbatches']} of {row['microbatch_size']}",
                recompute,
                row["data_strategy"] if row["data"] * row["context"] > 1 else "-",
                seconds_text(row["step_seconds"]),
                percent_text(row["model_flops_utilization"]),
                bytes_text(max(row["peak_bytes"])),
            ]
        )
    best = rows[0]
    step = best["step_seconds"]
    lines = table_lines(cells, left=[6, 7, 8, 9])
    parts = [f"{name} {percent_text(value / step)}" for name, value in best["seconds"].items() if value > 0.0005 * step]
    lines += ["", f"time of plan 1: {', '.join(parts)}"]
    lines.append(
        f"{number_text(best['tokens_per_second'])} tokens/s; peak {bytes_text(max(best['peak_bytes']))}"
        + ("" if memory == float("inf") else f" of {bytes_text(memory)} per device")
    )
    lines += missed(costs, answer, memory)
    lines.append(
        f"{answer.considered:,} configurations considered, {answer.simulated:,} simulated, in "
        f"{seconds_text(answer.seconds)}; refused or discarded:"
    )
    lines += [f"  {count:>9,}  {reason}" for reason, count in answer.refused.items()]
    return lines


def missed(costs: CostModel, answer: Answer, memory: float) -> list[str]:
    """What the fastest configuration that did not fit would need."""
    if answer.next_best is None:
        return []
    seconds, needed, _ = answer.next_best
    best = answer.plans[0].step_seconds
    if seconds >= best:
        return []
    return [f"{bytes_text(needed - memory)} more per device: {percent_text(1 - seconds / best)} faster"]
