"""`fastest_plan`: the plan whose steps are measured to be the fastest."""

import gc
import json
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from pipeloom.errors import InputError, folded
from pipeloom.plan.local.trials import STEPS, WARM_UP, in_order, measured, plain_ones, ranking
from pipeloom.plan.plan import Plan
from pipeloom.processes.members import Members, current_members

if TYPE_CHECKING:
    from pipeloom.training.pipeline import Pipeline


def fastest_plan(
    plans: Sequence[Plan], start: "Callable[[Plan], Pipeline]", step: "Callable[[Pipeline], object]"
) -> Plan:
    """Run steps of the plans that are predicted to be nearly as fast as the fastest, and return the fastest of them.

    Predictions of plans that are nearly as fast differ by less than their errors. Where the steps take longer than
    another plan is predicted to, that one runs some too. Plans take turns of 7 steps, for at most about half a minute.
    A plain plan, of 1F1B with one stage per rank, is left only for one with the same degrees that was faster in three
    quarters of the turns.
    Every process of a run calls this, and gets the same plan.

    Args:
        plans: those of process 0 count, such as `pipeloom.plans` finds. At most 6 run steps.
        start: makes the pipeline of a plan; it is closed after each turn. Give each a model of its own.
        step: runs one step.

    Raises:
        InputError: process 0 has no plans.
    """
    if isinstance(plans, Plan):
        raise InputError("fastest_plan got one plan. Pass a list, such as that of pipeloom.plans.")
    if not isinstance(plans, Sequence) or not all(isinstance(each, Plan) for each in plans):
        raise InputError(f"fastest_plan got {folded(plans)}. Pass a list of plans, such as that of pipeloom.plans.")
    members = current_members()
    try:
        if members is not None:
            texts = members.gather(json.dumps([plan.to_json() for plan in plans]).encode())
            plans = [Plan.from_json(each) for each in json.loads(texts[0])]
        if not plans:
            raise InputError("fastest_plan got no plans. Pass those of pipeloom.plans.")
        plain = plain_ones(ordered := sorted(plans, key=_predicted)).get(0)
        ordered, first = in_order(ordered, _predicted, None if plain is None else ordered[plain])
        first = first if len(ordered) > 1 else 0
        predicted = [*map(_predicted, ordered)]
        found = measured(predicted, lambda number: _seconds(members, start(ordered[number]), step), first)
        return ordered[(ranking(found, plain_ones(ordered)) or [0])[0]]
    finally:
        if members is not None:
            members.close()


def _predicted(plan: Plan) -> float:
    return plan.predicted_step_seconds or 0.0


def _seconds(members: Members | None, pipe: "Pipeline", step: "Callable[[Pipeline], object]") -> list[float]:
    """Of steps behind those that warm up, those of the slowest process."""
    found = []
    with pipe:
        for _ in range(WARM_UP + STEPS):
            if members is not None:
                members.gather(b"")  # a barrier
            begin = perf_counter()
            step(pipe)
            found.append(perf_counter() - begin)
    gc.collect()
    if members is None:
        return found[WARM_UP:]
    every = [json.loads(each) for each in members.gather(json.dumps(found[WARM_UP:]).encode())]
    return list(map(max, zip(*every, strict=True)))
