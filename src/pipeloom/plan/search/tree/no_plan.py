"""Why a request has no plan. No torch here."""

from collections.abc import Iterator, Mapping
from math import inf, prod
from typing import Any

from pipeloom import schedules
from pipeloom.common.quantities import bytes_text, counted
from pipeloom.errors import InputError, ScheduleError, either
from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.options import Precision
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.shapes import shape_of
from pipeloom.plan.search.space.ways import without_effect

_DEGREES = ("pipeline", "data", "tensor", "context")
_BATCH = ("data", "microbatches", "microbatch_size")


def no_plan(costs: StepCosts, request: Request, refusals: Refusals, least_peak: float) -> str:
    """The message of a search that found no plan; `least_peak` is the least peak of a plan with any memory."""
    if least_peak < inf:
        more = bytes_text(least_peak - request.memory_bytes)
        change = f", or change {' or '.join(request.names.given)}" if request.names.given else ""
        return (
            f"{request.asked}: no plan fits into {bytes_text(request.memory_bytes)} per device; the smallest one found "
            f"needs {bytes_text(least_peak)}, {more} more. Use more devices, devices with more memory, or a "
            f"larger {request.names.cap}{change}."
        )
    reasons = "; ".join(f"{reason} ({number})" for reason, number in refusals.reasons.most_common(3))
    names = request.names
    conditions = " and ".join(names.given or (names.fix,))
    unknown = reasons or f"the values of {conditions} exclude each other", (names.devices, names.batch)
    why, others = next(_wrong(costs, request), unknown)
    return f"{request.asked}: no plan can run: {why}. Change {either((*others, *names.given) or unknown[1])}."


def _wrong(costs: StepCosts, request: Request) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Which values of ``--fix`` and ``--forbid`` no plan can have, the plainest reason first.

    With each, what else to change in place of them.
    """
    fixed, devices, batch = request.fixed, request.names.devices, request.names.batch
    sizes = ("devices", request.devices, _DEGREES, devices), ("samples", request.batch_size, _BATCH, batch)
    for whole, size, names, other in sizes:
        given = {name: fixed[name] for name in names if name in fixed}
        if size % prod(given.values()):
            yield f"{size} {whole} cannot be divided by {_product(given)}", (other,)
    degrees = {**{name: 1 for name in _DEGREES if name in request.forbidden}, **fixed}
    degrees = {name: degrees[name] for name in _DEGREES if name in degrees}
    if len(degrees) == len(_DEGREES) and prod(degrees.values()) < request.devices and request.objective != "cost":
        yield f"{_product(degrees)} use {prod(degrees.values())} of {counted(request.devices, 'device')}", (devices,)
    if request.objective != "cost":
        degrees = _following(degrees, request.devices)
    parts = {name: number for name in _BATCH if (number := fixed.get(name, degrees.get(name))) is not None}
    if request.batch_size % prod(parts.values()):
        yield f"{request.batch_size} samples cannot be divided by {_product(parts)}", (devices, batch)
    if len(parts) == len(_BATCH) and prod(parts.values()) < request.batch_size:
        yield f"{_product(parts)} are {prod(parts.values())} of {counted(request.batch_size, 'sample')}", (batch,)
    for reason in _excluded(costs, request, degrees):
        yield reason, ()
    one = degrees.get("pipeline", 1) * degrees.get("tensor", 1) == request.devices
    if one and (name := without_effect(request)) is not None:
        yield f"{name}={fixed[name]} has no effect with one replica", (devices,)


def _following(degrees: Mapping[str, int], devices: int) -> dict[str, int]:
    """The degrees that plans must have, with those that follow from the number of devices."""
    others, left = [name for name in _DEGREES if name not in degrees], devices // prod(degrees.values())
    if len(others) == 1:
        return {**degrees, others[0]: left}
    return {**degrees, **dict.fromkeys(others, 1)} if left == 1 else dict(degrees)


def _excluded(costs: StepCosts, request: Request, degrees: Mapping[str, int]) -> Iterator[str]:
    """Which values no plan of the model can have, whatever the devices and the batch.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        degrees: that plans must have.
    """
    fixed = request.fixed
    formats: tuple[Any, ...] = request.precisions or ((fixed["precision"],) if "precision" in fixed else ())
    unknown = [costs.unknown(Configuration(precision=Precision(name))) or "" for name in formats]
    if unknown and all(reason.startswith("precision=") for reason in unknown):
        yield unknown[0]
    if fixed.get("sequence") and degrees.get("tensor") == 1:
        yield "sequence=true has no effect with tensor=1"
    yield from _wrong_stages(costs, request, degrees.get("pipeline", 1))
    expert, slices = fixed.get("expert", 1), fixed.get("slices", 1)
    if expert not in costs.expert_degrees:
        experts = max(costs.expert_degrees)
        yield f"expert={expert}: {f'must divide the {experts} experts' if experts > 1 else 'the model has no experts'}"
    if slices > 1 and fixed.get("context", 1) > 1:
        yield f"context={fixed['context']} and slices={slices}: both divide sequences, and exclude each other"
    if slices > 1 and costs.tokens % slices:
        yield f"slices={slices}: must divide the {costs.tokens} tokens of a sequence"
    inside = {name: fixed[name] for name in ("tensor", "context", "context_kind", "sequence") if name in fixed}
    try:
        costs.check(Configuration(inside=InsideStage(**inside)))
    except InputError as error:
        yield _sentence(error)
    if "schedule" in fixed:
        yield from _unsupported(fixed, slices)
    single = degrees.get("data") == degrees.get("context") == 1
    if single and (name := without_effect(request)) is not None:
        yield f"{name}={fixed[name]} has no effect with one replica"
    usual = DataStrategy.DDP if "data_strategy" in request.forbidden else None
    granularity, strategy = fixed.get("data_granularity", Granularity.STEP), fixed.get("data_strategy", usual)
    if granularity != Granularity.STEP and strategy is not None and not DataStrategy(strategy).shards_gradients:
        yield f"data_granularity={granularity}: works with data_strategy zero2 and zero3, not {strategy}"


def _wrong_stages(costs: StepCosts, request: Request, pipeline: int) -> Iterator[str]:
    """Which values do not fit the number of stages, with so many ranks."""
    fixed, blocks = request.fixed, costs.num_blocks
    for name in ("blocks", "recompute"):
        number = len(fixed.get(name, ()))
        if number > 1 and number % (pipeline * fixed.get("chunks", 1)):
            ranks = {"pipeline": pipeline} | ({"chunks": fixed["chunks"]} if "chunks" in fixed else {})
            yield f"{name}={_list(fixed[name])}: {number} stages cannot be divided by {_product(ranks)}"
    if "blocks" in fixed and sum(fixed["blocks"]) != blocks:
        yield f"blocks={_list(fixed['blocks'])} add up to {sum(fixed['blocks'])}, and the model has {blocks}"
    if 0 in fixed.get("blocks", ()) and not request.ends_alone:
        yield f"blocks={_list(fixed['blocks'])}: each stage of this model needs a block"
    stages = {"chunks": fixed["chunks"]} if "chunks" in fixed else {}
    stages |= {"pipeline": pipeline} if "pipeline" in fixed or pipeline > 1 else {}
    if prod(stages.values()) > blocks + 2 * request.ends_alone or pipeline > blocks:
        yield f"{_product(stages)}: more stages than the {blocks} blocks of the model"


def _product(values: Mapping[str, Any]) -> str:
    return " x ".join(f"{name}={value}" for name, value in values.items())


def _list(values: Any) -> str:
    return ",".join(map(str, values))


def _unsupported(fixed: Mapping[str, Any], slices: int) -> Iterator[str]:
    """Why a schedule does not support sizes that are given."""
    name = fixed["schedule"]
    family = schedules.find(name)
    chunks = fixed.get("chunks", family.default_chunks)
    if family.chunks not in (None, chunks):
        yield f"chunks={chunks}: schedule {name!r} has {counted(family.default_chunks, 'stage')} per rank"
    try:
        shape_of(name, fixed.get("pipeline", 2), chunks, slices)
    except ScheduleError as error:
        yield _sentence(error).replace("num_ranks=", "pipeline=").replace("num_chunks=", "chunks=")


def _sentence(error: Exception) -> str:
    return str(error).rstrip(".")
