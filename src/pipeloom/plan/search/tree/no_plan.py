"""Why a request has no plan. No torch here."""

from collections.abc import Iterator, Mapping
from math import inf, prod
from typing import Any

from pipeloom import schedules
from pipeloom.common.quantities import bytes_text, counted
from pipeloom.errors import InputError, ScheduleError
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.shapes import shape_of

_DEGREES = ("pipeline", "data", "tensor", "context")


def no_plan(costs: StepCosts, request: Request, refusals: Refusals, least_peak: float) -> str:
    """The message of a search that found no plan; `least_peak` is the least peak of a plan with any memory."""
    if least_peak < inf:
        more = bytes_text(least_peak - request.memory_bytes)
        return (
            f"{request.asked}: no plan fits into {bytes_text(request.memory_bytes)} per device; the smallest one found "
            f"needs {bytes_text(least_peak)}, {more} more. Use more devices, or devices with more memory."
        )
    reasons = "; ".join(f"{reason} ({number})" for reason, number in refusals.reasons.most_common(3))
    fix = "fix" if request.in_python else "--fix"
    why = next(_wrong(costs, request), reasons or f"the values of {fix} exclude each other")
    return f"{request.asked}: no plan can run: {why}. Change devices, batch or {fix}."


def _wrong(costs: StepCosts, request: Request) -> Iterator[str]:
    """Which values of ``--fix`` no plan can have, the plainest reason first."""
    fixed = request.fixed
    for whole, size, names in (
        ("devices", request.devices, _DEGREES),
        ("samples", request.batch_size, ("data", "microbatches", "microbatch_size")),
    ):
        given = {name: fixed[name] for name in names if name in fixed}
        if size % prod(given.values()):
            yield f"{size} {whole} cannot be divided by {' x '.join(f'{name}={n}' for name, n in given.items())}"
    degrees = {**{name: 1 for name in _DEGREES if name in request.forbidden}, **fixed}
    degrees = {name: degrees[name] for name in _DEGREES if name in degrees}
    if len(degrees) == len(_DEGREES) and prod(degrees.values()) < request.devices:
        used = " x ".join(f"{name}={n}" for name, n in degrees.items())
        yield f"{used} use {prod(degrees.values())} of {counted(request.devices, 'device')}"
    if fixed.get("sequence") and degrees.get("tensor") == 1:
        yield "sequence=true has no effect with tensor=1"
    blocks, expert, slices = fixed.get("blocks"), fixed.get("expert", 1), fixed.get("slices", 1)
    if blocks is not None and sum(blocks) != costs.num_blocks:
        text = ",".join(map(str, blocks))
        yield f"blocks={text} add up to {sum(blocks)}, and the model has {costs.num_blocks}"
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
    if fixed.get("chunks", 1) * fixed.get("pipeline", 1) > costs.num_blocks + 2:
        yield f"chunks={fixed.get('chunks', 1)}: more stages than the {costs.num_blocks} blocks of the model"
    if "schedule" in fixed:
        yield from _unsupported(fixed, slices)


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
        yield _sentence(error)


def _sentence(error: Exception) -> str:
    return str(error).rstrip(".")
