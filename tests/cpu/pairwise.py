"""Pairwise tests: few cases of a grid in which any two values of two factors meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Any, ...])


def pairs(case: tuple[Any, ...]) -> set[Any]:
    """Two values of a case, with the places of their factors."""
    return set(combinations(enumerate(case), 2))


def pairwise(grid: Sequence[Case]) -> list[Case]:
    """Few cases of `grid` in which any two values of two factors meet, if they do in the grid."""
    missing = {pair for case in grid for pair in pairs(case)}
    chosen: list[Case] = []
    met: Counter[Any] = Counter()
    while missing:
        case = max(grid, key=lambda each: (len(pairs(each) & missing), -sum(met[value] for value in enumerate(each))))
        missing -= pairs(case)
        met.update(enumerate(case))
        chosen.append(case)
    return chosen


def fewer(few: Any, many: Any) -> list[Any]:
    """Parameters of a test: `few` in every run of the tests, `many` in whole grids."""
    return [few, pytest.param(many, marks=[pytest.mark.whole_grid, pytest.mark.timeout(900)])]


def of_grid(*factors: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the product of the factors, of which all but pairs is marked `whole_grid`."""
    grid = list(product(*factors))
    chosen = pairwise(grid)
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.whole_grid) for case in grid]
