"""Trial steps: the plans that are predicted to be the fastest run some steps, and the fastest of them is chosen.

Predictions of plans that are nearly as fast differ by less than their errors, which are some percent. Where the steps
take longer than another plan is predicted to, their prediction was further off, and that plan runs steps too. A plain
plan, of 1F1B with one stage per rank, is left only for one that was faster in most turns. No torch here.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from pipeloom.plan.local.references import lower_quartile
from pipeloom.plan.plan import Plan

T = TypeVar("T")

MOST_PLANS = 6
NEAR = 1.1  # predicted, over the least prediction
WARM_UP, STEPS = 2, 5
# A machine is faster and slower in phases, so plans take turns: all of them, then those that are nearly as fast.
PASSES, MOST_PASSES, CLOSE = 3, 9, 1.06
_MOST_SECONDS = 30.0  # of all trial steps
_STEADILY = 0.75  # of the turns


def tried(predicted: Sequence[float]) -> int:
    """How many of the best plans run trial steps first; 0: none, since the steps would take too long.

    Args:
        predicted: seconds per step, best plan first.
    """
    near = [seconds for seconds in predicted[:MOST_PLANS] if seconds <= NEAR * predicted[0]]
    while near and sum(near) * (WARM_UP + STEPS) > _MOST_SECONDS:
        near.pop()
    return len(near)


def in_order(plans: Sequence[T], seconds: Callable[[T], float], plain: T | None) -> tuple[list[T], int]:
    """Plans in the order in which they run trial steps, and how many of them run some first: among these `plain`.

    Args:
        plans: in any order.
        seconds: predicted per step of a plan.
        plain: one of them, which may be predicted to be far slower than the best one; None: none.
    """
    ranked = sorted(plans, key=seconds)
    near = ranked[: tried([*map(seconds, ranked)])]
    if near and plain is not None and plain not in near:
        room = tried([seconds(plain)] * MOST_PLANS)
        near = [*near[: room - 1], plain] if room > 1 else near
    return [*near, *(plan for plan in ranked if plan not in near)], len(near)


def turn(predicted: Sequence[float], trials: Sequence[Sequence[float]], first: int) -> list[int]:
    """The plans that run `WARM_UP` and `STEPS` steps next, one after another; empty: enough is known, or time is up.

    Args:
        predicted: seconds per step of each plan.
        trials: seconds of the steps that each has run, without those that warm up.
        first: plans that take the first turn.
    """
    begun = [plan for plan, measured in enumerate(trials) if measured]
    if not begun:
        return list(range(first))
    passes = {plan: len(trials[plan]) // STEPS for plan in begun}
    seconds = {plan: lower_quartile(trials[plan]) for plan in begun}
    number, least = max(passes.values()), min(seconds.values())
    if number == 1 and len(begun) < MOST_PLANS:
        chosen = [plan for plan, each in enumerate(predicted) if plan not in passes and each < least][:1]
    else:
        chosen = []
    few = 1
    if not chosen and number < MOST_PASSES:
        left = sorted((plan for plan in begun if passes[plan] == number), key=lambda plan: seconds[plan])
        chosen, few = [plan for plan in left if number < PASSES or seconds[plan] <= CLOSE * least], 2
    spent = sum(seconds[plan] * passes[plan] for plan in begun)
    room = _MOST_SECONDS / (WARM_UP + STEPS) - spent
    while chosen and sum(seconds.get(plan, predicted[plan]) for plan in chosen) > room:
        chosen.pop()  # the slowest: there is time for fewer
    return sorted(chosen) if len(chosen) >= few else []


def measured(predicted: Sequence[float], run: Callable[[int], Sequence[float]], first: int) -> list[list[float]]:
    """Seconds of the steps of each plan, turn after turn; of those that run none, an empty list.

    Args:
        predicted: seconds per step of each.
        run: of the number of a plan, the seconds of `STEPS` steps behind `WARM_UP` others.
        first: plans that take the first turn.
    """
    found: list[list[float]] = [[] for _ in predicted]
    while numbers := turn(predicted, found, first):
        for number in numbers:
            found[number] += run(number)
    return found


def ranking(trials: Sequence[Sequence[float]], plain: Mapping[int, int] = MappingProxyType({})) -> list[int]:
    """The plans that ran steps, fastest first: those that took the most turns, by the lower quartile of the seconds.

    Args:
        trials: seconds of the steps of each plan.
        plain: of some plans, the one that comes before them unless they were faster in most turns that both took.
    """
    most = max(map(len, trials), default=0)
    begun = [number for number, measured in enumerate(trials) if measured]
    ranked = sorted(begun, key=lambda number: (len(trials[number]) < most, lower_quartile(trials[number])))
    for number in ranked[::-1]:
        before = plain.get(number)
        if before not in ranked or len(trials[before]) < most or ranked.index(before) < ranked.index(number):
            continue
        if not _steadily_faster(trials[number], trials[before]):
            ranked.remove(number)
            ranked.insert(ranked.index(before) + 1, number)
    return ranked


def _steadily_faster(measured: Sequence[float], others: Sequence[float]) -> bool:
    """Whether a plan was faster than another one in most turns that both took."""
    turns = [range(begin, begin + STEPS) for begin in range(0, min(len(measured), len(others)), STEPS)]
    faster = [
        lower_quartile([measured[at] for at in each]) < lower_quartile([others[at] for at in each]) for each in turns
    ]
    return sum(faster) >= _STEADILY * len(turns)


def plain_ones(plans: Sequence[Plan]) -> dict[int, int]:
    """Of each plan that is not plain, the first plain one with the same degrees, if there is one."""
    plain: dict[tuple[int, ...], int] = {}
    for number, plan in enumerate(plans):
        if is_plain(plan.schedule, plan.virtual_stages):
            plain.setdefault(_degrees(plan), number)
    return {
        number: plain[_degrees(plan)]
        for number, plan in enumerate(plans)
        if _degrees(plan) in plain and not is_plain(plan.schedule, plan.virtual_stages)
    }


def is_plain(schedule: object, chunks: int | None) -> bool:
    """Whether plans with this schedule and so many stages per rank are plain ones."""
    return schedule == "1f1b" and chunks in (None, 1)


def _degrees(plan: Plan) -> tuple[int, ...]:
    return plan.pipeline, plan.data, plan.tensor, plan.context, plan.expert
