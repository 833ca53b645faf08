"""Pairwise tests: few cases of a grid in which any two values of two factors meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case", bound=tuple[Any, ...])


Places = Collection[tuple[int, int]]  # of two factors, in ascending order


def pairs(case: tuple[Any, ...], apart: Places = ()) -> set[Any]:
    """Two values of a case, with the places of their factors; without those of factors that are `apart`."""
    both = combinations(enumerate(case), 2)
    return {(one, other) for one, other in both if (one[0], other[0]) not in apart}


def pairwise(grid: Sequence[Case], apart: Places = ()) -> list[Case]:
    """Few cases of `grid` in which any two values of two factors meet, if they do in the grid.

    Values of two factors that are `apart` need not meet.
    """
    every = {case: pairs(case, apart) for case in grid}
    missing = set().union(*every.values())
    chosen: list[Case] = []
    met: Counter[Any] = Counter()
    while missing:
        case = max(grid, key=lambda each: (len(every[each] & missing), -sum(met[value] for value in enumerate(each))))
        missing -= every[case]
        met.update(enumerate(case))
        chosen.append(case)
    return chosen


def fewer(few: Any, many: Any) -> list[Any]:
    """Parameters of a test: `few` in every run of the tests, `many` in whole grids."""
    return [few, pytest.param(many, marks=[pytest.mark.whole_grid, pytest.mark.timeout(900)])]


def of_grid(*factors: Iterable[Any], apart: Places = ()) -> list[Any]:
    """Parameters of a test: the product of the factors, of which all but pairs is marked `whole_grid`."""
    grid = list(product(*factors))
    chosen = pairwise(grid, apart)
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.whole_grid) for case in grid]


def in_turn(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the product of two factors, of which every other cell, row by row, is marked `whole_grid`.

    Every value of either factor is in every run of the tests where both have two values or more.
    """
    cells = product(enumerate(first), enumerate(second))
    return [
        pytest.param(one, other, marks=pytest.mark.whole_grid if (row + column) % 2 else ())
        for (row, one), (column, other) in cells
    ]
