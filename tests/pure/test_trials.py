"""Which plans run trial steps, how often, and which one is chosen."""

import pytest

from pipeloom.plan.local.trials import (
    CLOSE,
    MOST_PASSES,
    MOST_PLANS,
    PASSES,
    STEPS,
    in_order,
    plain_ones,
    ranking,
    tried,
    turn,
)
from pipeloom.plan.plan import Plan


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        ([0.1], 1),
        ([0.1, 0.105, 0.111], 2),  # the last one is predicted to be too slow
        ([0.1] * 9, MOST_PLANS),
        ([2.0, 2.1, 2.1], 2),  # three would take too long
        ([60.0, 61.0], 0),
        ([4.0, 4.1], 1),
    ],
)
def test_plans_that_are_nearly_as_fast_are_tried(predicted, expected):
    assert tried(predicted) == expected


def turns(predicted: list[float], measured: list[float]) -> list[list[int]]:
    """Who runs in each turn, where every step of a plan takes as long."""
    trials: list[list[float]] = [[] for _ in measured]
    found = []
    while numbers := turn(predicted, trials, tried(predicted)):
        found.append(numbers)
        for number in numbers:
            trials[number] += [measured[number]] * STEPS
    return found


def test_all_plans_take_turns_then_those_that_are_nearly_as_fast():
    found = turns([0.1] * 4, [0.11, 0.1, 0.105, 0.102])
    assert found == [[0, 1, 2, 3]] * PASSES + [[1, 2, 3]] * (MOST_PASSES - PASSES)


def test_a_plan_that_is_clearly_the_fastest_ends_them():
    assert turns([0.1, 0.1], [0.1, 0.1 * CLOSE + 0.001]) == [[0, 1]] * PASSES


def test_plans_that_are_predicted_faster_than_steps_take_run_some_too():
    """The first two are predicted three times as fast as they are."""
    found = turns([0.1, 0.105, 0.15, 0.16, 0.2], [0.3, 0.31, 0.16, 0.18, 0.2])
    assert found == [[0, 1], [2], *[[0, 1, 2]] * (PASSES - 1)]


def test_one_plan_runs_steps_to_see_whether_its_prediction_holds():
    assert turns([0.1, 0.15], [0.14, 0.15]) == [[0]]
    assert turns([0.1, 0.15], [0.16, 0.15])[:3] == [[0], [1], [0, 1]]


def test_no_more_than_so_many_plans_run_steps():
    found = turns([0.01 + 0.001 * number for number in range(9)], [0.1] * 9)
    assert sorted({plan for numbers in found for plan in numbers}) == list(range(MOST_PLANS))


@pytest.mark.parametrize(("seconds", "plans", "expected"), [(2.0, 2, 1), (0.4, 5, 2), (0.3, 2, 7)])
def test_they_take_turns_as_often_as_time_allows(seconds, plans, expected):
    assert len(turns([seconds] * plans, [seconds] * plans)) == expected


def test_where_time_is_short_the_fastest_take_turns_alone():
    """A turn of all takes 21 s of 30."""
    assert turns([0.5] * 6, [0.52, 0.51, 0.5, 0.49, 0.5, 0.5]) == [[*range(6)], [2, 3]]


def test_the_fastest_is_the_one_that_is_least_disturbed():
    """Other load only ever makes a step longer, so neither a lucky nor a disturbed step decides."""
    assert ranking([[1.1] * 8, [1.0, 1.0, 1.0, 1.1, 5.0, 5.0, 9.0, 9.0], [0.9, *[1.2] * 7]])[0] == 1


def test_a_plan_that_was_left_out_is_not_the_fastest():
    assert ranking([[0.9] * 5, [1.1] * 10, [1.0] * 10, []]) == [2, 1, 0]


@pytest.mark.parametrize(
    ("seconds", "plain", "expected"),
    [
        ([0.3, 0.1, 0.105, 0.2], 0.3, ([0.1, 0.105, 0.3, 0.2], 3)),  # far slower, and tried
        ([0.105, 0.1, 0.2], 0.105, ([0.1, 0.105, 0.2], 2)),
        ([0.1, 0.2], None, ([0.1, 0.2], 1)),
        ([0.1, 9.0], 9.0, ([0.1, 9.0], 1)),  # its steps would take too long
        ([60.0, 61.0], 61.0, ([60.0, 61.0], 0)),
        ([0.1, 0.11, 0.12, 0.13, 0.14, 0.15, 0.9], 0.9, ([0.1, 0.11, 0.9, 0.12, 0.13, 0.14, 0.15], 3)),
    ],
)
def test_a_plain_plan_runs_steps_too(seconds, plain, expected):
    assert in_order(seconds, float, plain) == expected


FAST, SLOW = [0.1] * STEPS, [0.11] * STEPS


@pytest.mark.parametrize(
    ("trials", "expected"),
    [
        ([FAST * 4, SLOW * 4], [0, 1]),
        ([FAST * 3 + SLOW, SLOW * 3 + FAST], [0, 1]),  # faster in three of four turns
        ([FAST * 2 + [0.12] * STEPS * 2, SLOW * 4], [1, 0]),  # in two of four, which may be luck
        ([FAST * 4, SLOW * 3], [0, 1]),  # the plain one was left out
        ([SLOW * 4, FAST * 4], [1, 0]),
    ],
)
def test_a_plain_plan_is_left_for_one_that_is_faster_in_most_turns(trials, expected):
    assert ranking(trials, {0: 1}) == expected


def test_plans_that_are_not_steadily_faster_come_behind_the_plain_one_in_their_order():
    lucky = [FAST * 2 + SLOW * 2, [0.101] * 2 * STEPS + SLOW * 2, [0.105] * 4 * STEPS, [0.106] * 4 * STEPS]
    assert ranking(lucky, {0: 3, 1: 3, 2: 3}) == [2, 3, 0, 1]
    assert ranking(lucky) == [0, 1, 2, 3]


def test_a_plan_is_compared_with_the_plain_one_of_its_degrees():
    def plan(schedule, pipeline, data=1, **options):
        return Plan(schedule=schedule, pipeline=pipeline, data=data, microbatches=4, **options)

    plans = [
        *(plan("zb-h1", 2), plan("interleaved", 2, virtual_stages=2), plan("gpipe", 1, 2)),
        *(plan("1f1b", 2), plan("1f1b", 4), plan("1f1b", 2, cut=(3, 5))),
    ]
    assert plain_ones(plans) == {0: 3, 1: 3}
