"""The parts of the space of configurations take turns, until all are done or have had their share. No torch here.

A search of the whole space would end among the few meshes whose bounds are most too low. So each part has a search of
its own, and turns that get longer. A turn begins with the part that has the best plan, then the bounds decide.
"""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from pipeloom.plan.search.parts.searches import Searches
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch


class _Turn(NamedTuple):
    """Of the steps of a search, for each part without and with loose bounds, and for all of them."""

    firm: float
    loose: float
    most: float


_FIRST = 0.01, 0.02  # of the steps of a search, for each part, on few and on many devices
_WITHOUT = 8.0  # of them on many devices, for all parts while there is no plan
_FEW = (_Turn(0.02, 0.02, 1.0), _Turn(0.05, 0.05, 1.0), _Turn(0.2, 0.1, 1.0))
_MANY = (_Turn(0.0, 0.3, inf), _Turn(0.5, 0.5, inf))
_NEAR = 1.1  # of the bound of what is left: there are no more turns
_LAST = 0.3  # for the part that has the best plan, and behind it those with the least bounds


def take_turns(searches: Searches, parts: Sequence[TreeSearch], best: BestPlans) -> None:
    """Search the parts of the space until all are done, or have had their turns.

    Args:
        searches: of the request.
        parts: of the space.
        best: plans that are known; it is changed.
    """
    without, turns = (_WITHOUT, _MANY) if searches.request.of_many else (inf, _FEW)
    _first_turn(searches, parts, best, without)
    if not best.plans:
        return
    for turn in turns:
        _turn(searches, parts, turn.firm, turn.most, loose=False)
        _turn(searches, parts, turn.loose, turn.most, loose=True)
        if best.best_value <= _NEAR * min(part.least for part in parts):
            return
    _turn(searches, parts, 1.0, 1.0 if len(parts) == 1 else _LAST, loose=True)


def _first_turn(searches: Searches, parts: Sequence[TreeSearch], best: BestPlans, without: float) -> None:
    """A short turn of each part; while there is no plan, longer ones, together by `without` of the steps."""
    for loose in (False, True):
        for part in _left(parts, loose=loose):
            if loose and best.plans:
                return
            known = bool(best.plans)
            spent = searches.run(
                part, _FIRST[searches.request.of_many], loose=loose, without=0.0 if known else max(0.0, without)
            )
            without -= 0.0 if known else spent


def _left(parts: Sequence[TreeSearch], *, loose: bool = True) -> list[TreeSearch]:
    """The parts that are not done, in the order of their turns."""
    left = [part for part in parts if part.least_of(loose=loose) < inf]
    return sorted(left, key=lambda part: (not part.has_best, part.least_of(loose=loose)))


def _turn(searches: Searches, parts: Sequence[TreeSearch], each: float, most: float, *, loose: bool) -> None:
    """A turn of each part, and of all parts together at most so many of the steps."""
    spent = 0.0
    for part in _left(parts, loose=loose):
        if spent < most and each:
            spent += searches.run(part, min(each, most - spent), loose=loose)
