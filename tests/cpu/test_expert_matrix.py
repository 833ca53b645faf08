"""Experts on several processes x schedules x data strategies x routers x recomputation: each trains as one process."""

from __future__ import annotations

import pytest

from tests.cpu.expert_cases import (
    SCHEDULES,
    SHARINGS,
    STRATEGIES,
    Case,
    Expected,
    draw_equally,
    expected_of,
    grid,
    in_threads,
    size_of_mesh,
    train_and_compare,
)
from tests.cpu.pairwise import fewer, pairs, pairwise
from tests.cpu.ranks import run_ranks

EVERY = pairwise(grid())
SHARING, SCHEDULE, DATA, ROUTER = range(4)
# Factors with many values meet in whole grids; to data strategies the parameters of all routers are alike.
CASES = pairwise(grid(), apart={(SHARING, SCHEDULE), (SHARING, ROUTER), (SCHEDULE, ROUTER), (DATA, ROUTER)})


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pairs_of_factors_train_as_one_process(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    draw_equally(monkeypatch)
    in_threads(case, updates=1)


@pytest.mark.whole_grid
@pytest.mark.parametrize("case", [case for case in EVERY if case not in CASES], ids=str)
def test_pairs_of_all_factors_train_as_one_process(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    draw_equally(monkeypatch)
    in_threads(case, updates=1)


@pytest.mark.parametrize("updates", fewer(4, 10))
@pytest.mark.parametrize("sharing", ["ep 2 of 4", "ep 2 tp 2 sequence"])
def test_updates_train_as_one_process(sharing: str, updates: int) -> None:
    in_threads(Case(sharing, "1f1b", "zero1", "drops", "none", "counts"), updates=updates)


def test_any_two_values_meet() -> None:
    assert set().union(*map(pairs, EVERY)) == set().union(*map(pairs, grid()))
    for factor in Case._fields:
        assert {getattr(case, factor) for case in CASES} == {getattr(case, factor) for case in grid()}


def test_tokens_are_dropped() -> None:
    """Where the matrix says so: the numbers of dropped tokens that it compares are not 0."""
    wanted = expected_of(Case("ep 2", "1f1b", "ddp", "drops", "none", "counts"), 2)
    assert all(values > 0 for step in wanted.observed for (_, name), values in step.items() if name == "dropped")


def _in_processes(rank: int, wanted: dict[Case, Expected]) -> None:
    for case, of_case in wanted.items():
        train_and_compare(case, of_case)


@pytest.mark.whole_grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("data", STRATEGIES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sharing", SHARINGS)
def test_every_combination_trains_as_one_process(
    monkeypatch: pytest.MonkeyPatch, sharing: str, schedule: str, data: str
) -> None:
    """In processes, where products of experts add to gradients themselves: threads leave that to autograd."""
    draw_equally(monkeypatch)
    cases = [case for case in grid() if (case.sharing, case.schedule, case.data) == (sharing, schedule, data)]
    wanted = {case: expected_of(case, 2) for case in cases}
    run_ranks(_in_processes, size_of_mesh(sharing), wanted, timeout_seconds=3600)


def test_eight_processes_train_as_one() -> None:
    """pp 2 x ep 2 x tp 2."""
    case = Case("ep 2 tp 2 sequence", "zb-v", "zero1", "drops", "full", "counts")
    run_ranks(_in_processes, size_of_mesh(case.sharing), {case: expected_of(case, 2)})
