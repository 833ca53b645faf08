"""Trial steps: the plans that are predicted to be the fastest run some steps, and the fastest of them is chosen.

Predictions of plans that are nearly as fast differ by less than their errors, which are some percent. Where the steps
take longer than another plan is predicted to, their prediction was further off, and that plan runs steps too. No torch
here.
"""

from collections.abc import Callable, Sequence

from pipeloom.plan.local.references import lower_quartile

MOST_PLANS = 6
NEAR = 1.1  # predicted, over the least prediction
WARM_UP, STEPS = 2, 5
# A machine is faster and slower in phases, so plans take turns: all of them, then those that are nearly as fast.
PASSES, MOST_PASSES, CLOSE = 3, 9, 1.06
_MOST_SECONDS = 30.0  # of all trial steps


def tried(predicted: Sequence[float]) -> int:
    """How many of the best plans run trial steps first; 0: none, since the steps would take too long.

    Args:
        predicted: seconds per step, best plan first.
    """
    near = [seconds for seconds in predicted[:MOST_PLANS] if seconds <= NEAR * predicted[0]]
    while near and sum(near) * (WARM_UP + STEPS) > _MOST_SECONDS:
        near.pop()
    return len(near)


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
    if not chosen and len(begun) > 1 and number < MOST_PASSES:
        chosen = [plan for plan in begun if number < PASSES or seconds[plan] <= CLOSE * least]
        chosen = chosen if len(chosen) > 1 else []
    spent = sum(seconds[plan] * passes[plan] for plan in begun)
    spent += sum(seconds.get(plan, predicted[plan]) for plan in chosen)
    return chosen if spent * (WARM_UP + STEPS) <= _MOST_SECONDS else []


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


def ranking(trials: Sequence[Sequence[float]]) -> list[int]:
    """The plans that ran steps, fastest first: those that took the most turns, by the lower quartile of the seconds."""
    most = max(map(len, trials), default=0)
    begun = [number for number, measured in enumerate(trials) if measured]
    return sorted(begun, key=lambda number: (len(trials[number]) < most, lower_quartile(trials[number])))
