"""Every layout inside a stage x schedules x data strategies x ties x key heads: each trains as one process does."""

from __future__ import annotations

import pytest

import pipeloom as pl
from tests.cpu.inside_stage import (
    FOUR_AXES,
    LAYOUTS,
    SCHEDULES,
    STRATEGIES,
    UPDATES,
    Case,
    degrees_of,
    expected_of,
    grid,
    in_threads,
    size_of,
    train_and_compare,
)
from tests.cpu.pairwise import pairs, pairwise
from tests.cpu.ranks import run_ranks


def _here(case: Case) -> bool:
    """Eight ranks per stage: only states that are sharded, with one schedule.

    These layouts meet other schedules in processes, below, and zb-h1, zb-v and slices in test_tensor_grid_models.
    """
    return size_of(LAYOUTS[case.layout].degrees) < 8 or (case.schedule == "1f1b" and case.data != "ddp")


def _kind(case: Case) -> str:
    """Of the layouts of a kind the schedules know the same: sums within an action, a grid of ranks, or a ring."""
    layout = LAYOUTS[case.layout]
    return "context" if layout.context else "grid" if "layout" in (layout.options or {}) else "1d"


EVERY = pairwise(grid())
KIND, LAYOUT, SCHEDULE = 0, 1, 2
# Every schedule with every kind of layout, and any two values of two other factors: of all factors, in whole grids.
CASES = [
    Case(*case)
    for _, *case in pairwise(
        [(_kind(case), *case) for case in grid() if _here(case)], apart={(KIND, LAYOUT), (LAYOUT, SCHEDULE)}
    )
]
FEW = 2  # updates where the whole grid makes more
ONCE = [0, pytest.param(UPDATES, marks=[pytest.mark.whole_grid, pytest.mark.timeout(600)])]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_of_all_factors_train_as_one_process(case: Case) -> None:
    has_two = size_of(LAYOUTS[case.layout].degrees) == 2
    one_replica = _kind(case) == "grid" and case.data == "ddp" and case.layers > 2  # with two: other schedules
    updates = FEW if has_two and case.schedule == "1f1b" else 0
    in_threads(case, dp=1 if one_replica else None, updates=updates, few=True)


@pytest.mark.whole_grid
@pytest.mark.parametrize("case", [case for case in EVERY if case not in CASES], ids=str)
def test_other_pairs_train_as_one_process(case: Case) -> None:
    in_threads(case, updates=0, few=True)


@pytest.mark.whole_grid  # of 2d: in processes; with one stage: test_tensor_grid_models
@pytest.mark.parametrize("layout", ["2.5d", "3d"])
def test_twenty_updates_on_eight_ranks_per_stage(layout: str) -> None:
    in_threads(Case(layout, "1f1b", "ddp", tied=True, grouped=True), dp=1)


def test_any_two_values_meet() -> None:
    met = set().union(*map(pairs, EVERY))
    assert met == set().union(*map(pairs, grid()))
    of_kinds = {(_kind(case), case.schedule) for case in grid()}
    assert {(_kind(case), case.schedule) for case in CASES} == of_kinds
    apart = {(LAYOUT - 1, SCHEDULE - 1)}  # places in a case, which names no kind
    lost = set().union(*(pairs(case, apart) for case in grid())) - set().union(*map(pairs, CASES))
    assert lost <= set().union(*map(pairs, IN_SIXTEEN)), lost
    pairs_of_layouts = {(case.layout, case.schedule) for case in EVERY}
    assert len(pairs_of_layouts) == len(LAYOUTS) * len(SCHEDULES) - 3, "sequences of context-parallel ranks are parts"
    found = {(case.layout, case.data) for case in [*CASES, *IN_SIXTEEN]}
    assert found == {(name, data) for name in LAYOUTS for data in STRATEGIES}


@pytest.mark.whole_grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", grid(), ids=str)
def test_every_combination_trains_as_one_process(case: Case) -> None:
    in_threads(case)


def _in_processes(rank: int, cases: list[Case], dp: int, updates: int) -> None:
    for case in cases:
        with pl.Mesh(**degrees_of(LAYOUTS[case.layout], dp=dp)) as mesh:
            train_and_compare(case, mesh, updates=updates, few=updates < UPDATES)


def in_processes(*cases: Case, dp: int = 1, updates: int = UPDATES) -> None:
    """On two stages; all cases have as many ranks per stage."""
    for case in cases:
        expected_of(case, updates=updates)
    (ranks,) = {size_of(degrees_of(LAYOUTS[case.layout], dp=dp)) for case in cases}
    run_ranks(_in_processes, ranks, cases, dp, updates)


@pytest.mark.parametrize("updates", ONCE)  # in float32: test_train_tensor
def test_four_processes_train_as_one(updates: int) -> None:
    in_processes(
        Case("1d", "zb-v", "ddp", True, True),
        Case("1d with sequence", "interleaved", "ddp", True, False),
        Case("ring", "dualpipev", "zero1", True, True),
        Case("ring-self-attention", "1f1b", "zero3", False, False),
        Case("ulysses", "zb-v", "zero3", False, True),
        updates=updates,
    )


@pytest.mark.parametrize("updates", ONCE)
def test_eight_processes_train_as_one(updates: int) -> None:
    in_processes(Case("2d", "1f1b", "ddp", True, True), updates=updates)


IN_SIXTEEN = [Case("2.5d", "zb-v", "ddp", False, True), Case("3d", "interleaved", "ddp", True, False)]


@pytest.mark.parametrize("updates", ONCE)
def test_sixteen_processes_train_as_one(updates: int) -> None:
    in_processes(*IN_SIXTEEN, updates=updates)


def _on_four_axes(rank: int, case: Case, updates: int) -> None:
    with pl.Mesh(**degrees_of(FOUR_AXES, dp=2)) as mesh:
        train_and_compare(case, mesh, FOUR_AXES, updates=updates)


@pytest.mark.parametrize("updates", ONCE)
def test_four_axes_at_once(updates: int) -> None:
    """pp 2 x dp 2 x cp 2 x tp 2."""
    case = Case("four axes", "zb-v", "zero1", True, True)
    expected_of(case, FOUR_AXES, updates=updates)
    run_ranks(_on_four_axes, 16, case, updates)


@pytest.mark.whole_grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", STRATEGIES)
def test_processes_and_replicas_train_as_one(layout: str, data: str) -> None:
    """On two data-parallel replicas, with a schedule of split backwards."""
    in_processes(Case(layout, "zb-v", data, True, True), dp=1 if LAYOUTS[layout].context else 2)
