"""The searches of a request: each part of the space is searched, in turns. No torch here."""

from math import inf

from pipeloom.plan.search.parts.searches import Searches
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch

# Of the steps of a search, for each part without and with loose bounds, and for all parts, in turns that get longer.
_TURNS = ((0.01, 0.0, inf), (0.05, 0.02, 1.0), (0.2, 0.1, 1.0))
_MANY = ((0.05, 0.0, inf), (0.3, 0.0, inf), (1.0, 0.0, 2.0))
_LAST = 0.3  # for the parts that are left


def search_few(searches: Searches, parts: list[TreeSearch], best: BestPlans) -> None:
    """Search the parts of the space until all are done, or have had their turns.

    Args:
        searches: of the request.
        parts: of the space.
        best: plans that are known; it is changed.
    """
    for number, (firm, loose, most) in enumerate(_MANY if searches.of_many else _TURNS):
        for all_, each in ((False, firm), (True, loose)):
            left = most
            for part in sorted(parts, key=lambda part: (not part.has_best, part.least_of(loose=all_))):
                if each and left > 0 and part.least_of(loose=all_) < inf:
                    left -= searches.run(part, min(each, left), loose=all_)
        if not best.plans or (number and searches.are_near(best, min(part.least for part in parts))):
            break
    left = 1.0 if not best.plans or len(parts) == 1 else _LAST
    for part in sorted(parts, key=lambda part: (not part.has_best, part.least)):
        if part.least < inf and (left > 0 or not best.plans):
            left -= searches.run(part, max(0.0, left))
