"""Copies of a pipeline that share parameters, against one process on all their samples."""

from __future__ import annotations

import pytest

import pipeloom as pl
from pipeloom.parallel.data.replica_group import ReplicaGroup
from tests.cpu.copies import ALIKE, FAMILIES, STRATEGIES, Case, expected, grid, thinned, train_and_compare
from tests.cpu.ranks import run_ranks


def num_steps(case: Case, *, whole: bool = False) -> int:
    """Ten in the `whole` grid where every schedule meets every strategy; else one, or two with tied parameters."""
    if whole:
        return 10 if case.granularity is None else 2
    return 2 if case.tied else 1


def _run_cases(rank: int, cases: list[Case], whole: bool) -> None:
    mesh = pl.Mesh(pp=2, dp=2)
    for case in cases:
        train_and_compare(case, mesh, num_steps(case, whole=whole))


def test_every_schedule_with_every_strategy_equals_one_process() -> None:
    cases = thinned()
    expected_pairs = {(family, strategy) for family in FAMILIES for strategy in ALIKE.get(family, STRATEGIES)}
    assert {(case.family, case.strategy) for case in cases} >= expected_pairs
    for factor in ("tied", "checkpointed", "optimizer", "dtype"):
        for strategy in STRATEGIES:
            assert len({getattr(case, factor) for case in cases if case.strategy == strategy}) == 2, (factor, strategy)
    for case in cases:  # once, before processes are forked
        expected(case, num_steps(case))
    run_ranks(_run_cases, 4, cases, False, timeout_seconds=600)


@pytest.mark.whole_grid
@pytest.mark.timeout(1500)
def test_every_schedule_with_every_strategy_in_every_state_equals_one_process() -> None:
    cases = grid()
    for case in cases:
        expected(case, num_steps(case, whole=True))
    run_ranks(_run_cases, 4, cases, True, timeout_seconds=1400)


def _run_without_sums(rank: int, strategy: str) -> None:
    ReplicaGroup.all_reduce = lambda self, values: lambda: None  # this process ends with the test
    ReplicaGroup.sum_parts = lambda self, leaving, own, take_sums: lambda: take_sums(own)
    train_and_compare(Case("1f1b", strategy), pl.Mesh(pp=2, dp=2), num_steps=1)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_the_comparison_notices_sums_that_do_nothing(strategy: str) -> None:
    with pytest.raises(AssertionError, match=r"gradient of .* is off by"):
        run_ranks(_run_without_sums, 4, strategy)
