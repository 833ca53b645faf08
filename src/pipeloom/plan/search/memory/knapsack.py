"""The cheapest choice of one alternative per item whose sizes fit. No torch here."""

from collections.abc import Sequence
from math import inf


def knapsack(items: Sequence[Sequence[tuple[float, float]]], most: float) -> tuple[int, ...] | None:
    """One alternative of each item, with the least sum of the first numbers and second ones of at most `most`.

    Exact: of the sums of the first items, those stay of which no other is smaller in both.

    Args:
        items: pairs of cost and size of their alternatives.
        most: sum of the sizes.

    Returns:
        The number of each item's alternative; None if none fit.
    """
    front: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    left = sum(min(size for _, size in alternatives) for alternatives in items)  # of the items that follow, at least
    for alternatives in items:
        left -= min(size for _, size in alternatives)
        sums = sorted(
            (cost + more, size + bigger, (*chosen, number))
            for cost, size, chosen in front
            for number, (more, bigger) in enumerate(alternatives)
            if size + bigger + left <= most * (1 + 1e-12)
        )
        front, least = [], inf
        for each in sums:
            if each[1] < least * (1 - 1e-12):
                front.append(each)
                least = each[1]
    return next((chosen for _, size, chosen in front if size <= most), None)
