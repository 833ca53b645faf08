"""What the best plan is compared with: plans with more memory, the usual choice, and a plain one. No torch here."""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, inf
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.local.trials import is_plain
from pipeloom.plan.search.best_first import find_plans
from pipeloom.plan.search.request import Request, score
from pipeloom.plan.search.simulated import Simulated

USUAL_NAME = "usual choice"
_FACTORS = (1.5, 1.1)  # of the memory of a device
_LEAST_GAIN = 0.01
_PART = 0.1  # of the steps of a search


def more_memory(costs: StepCosts, request: Request, best: Simulated, **asked: Any) -> tuple[float, float] | None:
    """More bytes per device with which a plan is faster, and the seconds of its step; None if there is none.

    Args:
        costs: of the model on its cluster.
        request: with the memory that there is.
        best: the best plan with it.
        asked: arguments of `find_plans`.
    """
    if request.memory_bytes == inf or request.objective != "time":
        return None
    gain: tuple[float, float] | None = None
    for factor in _FACTORS:
        more = replace(request, memory_bytes=factor * request.memory_bytes, top=1)
        found = find_plans(costs, more, known=[best], part=_PART, **asked).plans[0]
        if found.step_seconds >= (1 - _LEAST_GAIN) * best.step_seconds or found.peak <= request.memory_bytes:
            break  # less memory is no faster
        gain = found.peak - request.memory_bytes, found.step_seconds
    return gain


def usual_plan(costs: CostModel, request: Request, **asked: Any) -> Simulated | None:
    """Tensor parallelism in a node, then the fewest stages that fit, 1F1B, micro-batches of one sample.

    That is what arXiv:2104.04473 recommends (section 3). Values of the request that are fixed stay. None where no such
    plan fits.
    """
    node, model = costs.cluster.devices_per_node, costs.model
    common = gcd(model.heads, request.devices, model.mlp_width)
    usual = {
        "tensor": max(n for n in divisors(common) if n <= node),
        "context": 1,
        "slices": 1,
        "schedule": "1f1b",
        "microbatch_size": 1,
        "data_strategy": "zero1",
        "recompute": ("full",),
        "offload": None,
    }
    fixed = {**usual, **request.fixed}
    degrees = [n for n in divisors(request.devices) if n <= costs.num_blocks]
    for pipeline in [fixed["pipeline"]] if "pipeline" in fixed else degrees:
        if request.devices % (pipeline * fixed["tensor"]):
            continue
        shares = request.devices > pipeline * fixed["tensor"] or "data_strategy" in request.fixed
        values = fixed if shares else {key: value for key, value in fixed.items() if key != "data_strategy"}
        try:
            few = replace(request, fixed={**values, "pipeline": pipeline}, forbidden=frozenset(), top=1)
            return find_plans(costs, few, **asked).plans[0]
        except InputError:
            continue
    return None


def plain_of(plans: Sequence[Simulated]) -> Simulated | None:
    """The first plain plan with the degrees of the best one, `plans[0]`: 1F1B with one stage per rank."""
    degrees = _degrees(plans[0].of)
    alike = (each for each in plans if _degrees(each.of) == degrees)
    return next((each for each in alike if is_plain(each.of.schedule, each.of.chunks)), None)


def with_plain(costs: StepCosts, request: Request, plans: Sequence[Simulated], **asked: Any) -> list[Simulated]:
    """Plans with a plain one, see `plain_of`, which replaces the last of `request.top` where there is none.

    Steps show whether others are faster than it.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        plans: those that were found, best first.
        asked: arguments of `find_plans`.
    """
    if request.top == 1 or plain_of(plans) is not None:
        return list(plans)
    of = plans[0].of
    degrees = {"pipeline": of.pipeline, "data": of.data, "tensor": of.inside.tensor, "sequence": of.inside.sequence}
    degrees |= {"context": of.inside.context, "expert": of.inside.expert}
    fixed = {**degrees, "schedule": "1f1b", "chunks": 1, **request.fixed}
    try:
        found = find_plans(costs, replace(request, fixed=fixed, top=1), **asked).plans
    except InputError:
        return list(plans)
    if plain_of([plans[0], *found]) is None:
        return list(plans)
    both = [*plans[: request.top - 1], *found]  # the plain one may be better by less than a search looks for
    return sorted(both, key=lambda plan: score(request.objective, plan.step_seconds, plan.peak, plan.of.devices))


def _degrees(of: Configuration) -> tuple[object, ...]:
    return of.pipeline, of.data, of.inside
