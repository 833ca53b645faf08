"""The cheapest choice of one alternative per item whose sizes fit. No torch here."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import inf
from operator import itemgetter

Alternatives = tuple[tuple[float, float], ...]  # cost and size of each
Counts = tuple[int, ...]  # how many of equal items have each alternative
Sum = tuple[float, float, tuple[Counts, ...]]  # cost and size, and what has them
_SAME = 1e-12  # of sizes, which rounding may change


def knapsack(items: Sequence[Sequence[tuple[float, float]]], most: float) -> tuple[int, ...] | None:
    """One alternative of each item, with the least sum of the first numbers and second ones of at most `most`.

    Exact: of the sums of the first items, those stay of which no other is smaller in both. Most items are equal; of
    these, only the numbers with each alternative matter, and the first ones have the last alternatives.

    Args:
        items: pairs of cost and size of their alternatives.
        most: sum of the sizes.

    Returns:
        The number of each item's alternative; None if none fit.
    """
    equal: dict[Alternatives, list[int]] = defaultdict(list)
    for at, alternatives in enumerate(items):
        equal[tuple(alternatives)].append(at)
    of_groups = [_sums(alternatives, len(group)) for alternatives, group in equal.items()]
    front: list[Sum] = [(0.0, 0.0, ())]
    left = sum(sums[-1][1] for sums in of_groups)  # of the groups that follow, at least
    for sums in of_groups:
        left -= sums[-1][1]
        room = most * (1 + _SAME) - left
        front = _front(
            (cost + more, size + bigger, (*chosen, *counts))
            for cost, size, chosen in front
            for more, bigger, counts in sums
            if size + bigger <= room
        )
    best = next((chosen for _, size, chosen in front if size <= most), None)
    if best is None:
        return None
    found = [0] * len(items)
    for group, counts in zip(equal.values(), best, strict=True):
        numbers = [number for number, count in enumerate(counts) for _ in range(count)]
        for at, number in zip(group, reversed(numbers), strict=True):
            found[at] = number
    return tuple(found)


@lru_cache(maxsize=4096)
def _sums(alternatives: Alternatives, count: int) -> list[Sum]:
    """The sums of so many equal items of which no other is smaller in both; the last one is the smallest."""
    return _front(
        (
            sum(n * cost for n, (cost, _) in zip(counts, alternatives, strict=True)),
            sum(n * size for n, (_, size) in zip(counts, alternatives, strict=True)),
            (counts,),
        )
        for counts in _shared(count, len(alternatives))
    )


@lru_cache(maxsize=256)
def _shared(count: int, parts: int) -> list[Counts]:
    """All ways to share a number of items between so many alternatives."""
    if parts == 1:
        return [(count,)]
    return [(*some, first) for first in range(count + 1) for some in _shared(count - first, parts - 1)]


def _front(sums: Iterable[Sum]) -> list[Sum]:
    """Those of which no other is smaller in both, by cost."""
    front, least = list[Sum](), inf
    for each in sorted(sums, key=itemgetter(0, 1)):
        if each[1] < least * (1 - _SAME):
            front.append(each)
            least = each[1]
    return front
