"""Trial steps: the plans that are predicted to be the fastest run some steps, and the fastest of them is chosen.

Predictions of plans that are nearly as fast differ by less than their errors, which are some percent. No torch here.
"""

from collections.abc import Sequence

from pipeloom.plan.local.references import lower_quartile

MOST_PLANS = 6
NEAR = 1.1  # predicted, over the least prediction
WARM_UP, STEPS, PASSES = 2, 5, 3  # a machine is faster and slower in phases: plans take turns
_MOST_SECONDS = 30.0  # predicted, of all trial steps


def tried(predicted: Sequence[float]) -> int:
    """How many of the best plans run trial steps; 1: none do, since the steps would take too long.

    Args:
        predicted: seconds per step, best plan first.
    """
    near = [seconds for seconds in predicted[:MOST_PLANS] if seconds <= NEAR * predicted[0]]
    while len(near) > 1 and sum(near) * (WARM_UP + STEPS) > _MOST_SECONDS:
        near.pop()
    return len(near)


def passes_of(predicted: Sequence[float]) -> int:
    """How often plans with these predictions take turns."""
    return max(1, min(PASSES, int(_MOST_SECONDS / (sum(predicted) * (WARM_UP + STEPS)))))


def fastest(trials: Sequence[Sequence[float]]) -> int:
    """The plan whose lower quartile of measured seconds is the least."""
    return min(range(len(trials)), key=lambda number: lower_quartile(trials[number]))
