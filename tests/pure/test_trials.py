"""Which plans run trial steps, how often, and which one is chosen."""

import pytest

from pipeloom.plan.local.trials import MOST_PLANS, PASSES, fastest, passes_of, tried


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ([0.1], 1),
        ([0.1, 0.105, 0.111], 2),  # the last one is predicted to be too slow
        ([0.1] * 9, MOST_PLANS),
        ([2.0, 2.1, 2.1], 2),  # three would take too long
        ([60.0, 61.0], 1),
    ],
)
def test_plans_that_are_nearly_as_fast_are_tried(predicted, expected):
    assert tried(predicted) == expected


@pytest.mark.parametrize(("predicted", "expected"), [([0.1] * 6, PASSES), ([2.0, 2.1], 1), ([0.4] * 5, 2)])
def test_they_take_turns_as_often_as_time_allows(predicted, expected):
    assert passes_of(predicted) == expected


def test_the_fastest_is_the_one_that_is_least_disturbed():
    """Other load only ever makes a step longer, so neither a lucky nor a disturbed step decides."""
    assert fastest([[1.1] * 8, [1.0, 1.0, 1.0, 1.1, 5.0, 5.0, 9.0, 9.0], [0.9, *[1.2] * 7]]) == 1
