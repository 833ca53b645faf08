"""Trial steps: the plans that are predicted to be the fastest run some steps, and the fastest of them is chosen.

Predictions of plans that are nearly as fast differ by less than their errors, which are some percent. No torch here.
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
    """How many of the best plans run trial steps; 1: none do, since the steps would take too long.

    Args:
        predicted: seconds per step, best plan first.
    """
    near = [seconds for seconds in predicted[:MOST_PLANS] if seconds <= NEAR * predicted[0]]
    while len(near) > 1 and sum(near) * (WARM_UP + STEPS) > _MOST_SECONDS:
        near.pop()
    return len(near)


def turn(predicted: Sequence[float], trials: Sequence[Sequence[float]]) -> list[int]:
    """The plans that run `WARM_UP` and `STEPS` steps next, one after another; empty: enough is known, or time is up.

    Args:
        predicted: seconds per step of each plan.
        trials: seconds of the steps that each has run, without those that warm up.
    """
    passes = [len(measured) // STEPS for measured in trials]
    seconds = [
        lower_quartile(measured) if measured else least for measured, least in zip(trials, predicted, strict=True)
    ]
    number, plans = max(passes), range(len(trials))
    if number == MOST_PASSES:
        return []
    chosen = [plan for plan in plans if number < PASSES or seconds[plan] <= CLOSE * min(seconds)]
    spent = sum(seconds[plan] * passes[plan] for plan in plans) + sum(seconds[plan] for plan in chosen)
    if number and spent * (WARM_UP + STEPS) > _MOST_SECONDS:
        return []
    return chosen if len(chosen) > 1 else []


def measured(predicted: Sequence[float], run: Callable[[int], Sequence[float]]) -> list[list[float]]:
    """Seconds of the steps of each plan, turn after turn.

    Args:
        predicted: seconds per step of each.
        run: of the number of a plan, the seconds of `STEPS` steps behind `WARM_UP` others.
    """
    found: list[list[float]] = [[] for _ in predicted]
    while numbers := turn(predicted, found):
        for number in numbers:
            found[number] += run(number)
    return found


def ranking(trials: Sequence[Sequence[float]]) -> list[int]:
    """The plans, fastest first: by the lower quartile of measured seconds, and first those that took the most turns."""
    most = max(map(len, trials))
    return sorted(range(len(trials)), key=lambda number: (len(trials[number]) < most, lower_quartile(trials[number])))
