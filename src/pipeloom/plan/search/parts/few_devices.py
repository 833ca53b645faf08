"""The searches of a request on few devices, whose parts of the space can be searched for long. No torch here.

Most requests are settled by a search of the whole space. Where memory is short, bounds of plans that offload or slice
are far too low: there, parts without these are searched first, then those with them, again and again.
"""

from dataclasses import replace
from math import inf
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.plan.search.parts.searches import Degrees, Searches
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch

# Of the steps of a search: of the whole space, before and behind those of its parts.
_WHOLE, _REST = 0.05, 0.1
# For each pipeline degree without what has loose bounds; and of models with so many blocks on so many devices, for all
# of them in a second round. With more of both, there are more steps, and each takes longer.
_SHARE, _LONGER, _SMALL = 0.15, 2.0, (12, 8)
_OF_EXPERTS = 0.05, 0.4  # the same with experts, of which each degree is a part: for each, and for all
# For each part of the space; for all of them with whole sequences, and for all with any. Then again, if the best plan
# is still far from the bounds.
_LOOKS = (0.04, 0.3, 0.2), (0.1, 0.5, 0.2)
_BESIDE = 0.04  # for each tensor-parallel degree beside the best plan's pipeline
_STAGES = 0.3  # for several stages on ranks without a pipeline
_AT_BEST = 0.1  # for both degrees of the best plan, without what has loose bounds, and with it


def search_few(searches: Searches, parts: dict[Degrees, TreeSearch], best: BestPlans) -> TreeSearch:
    """The search of the whole space, behind those of its parts.

    Args:
        searches: of the request.
        parts: of the space, after a first look at each.
        best: plans that are known; it is changed.
    """
    firsts = {degrees: part.least for degrees, part in parts.items()}
    whole = searches.open(searches.request, best)
    searches.run(whole, _WHOLE if best.plans else 1.0)
    if whole.least < inf and best.plans:
        _firm_parts(searches, parts, best)
    if whole.least < inf and best.plans:
        # Most plans run whole sequences.
        fixed, forbidden = searches.request.fixed, searches.request.forbidden
        usual = dict.fromkeys({"context", "slices"} - fixed.keys() - forbidden, 1)
        of_sequences = replace(searches.request, fixed={**fixed, **usual})
        _looks(searches, [of_sequences, searches.request] if usual else [searches.request], firsts, best)
        pipeline = best.plans[0].of.pipeline
        for tensor in divisors(searches.request.devices // pipeline):
            _look(searches, best, _BESIDE, of_sequences, pipeline=pipeline, tensor=tensor)
        degrees = {"pipeline": best.plans[0].of.pipeline, "tensor": best.plans[0].of.inside.tensor}
        for space in (searches.firm, searches.request):
            _look(searches, best, _AT_BEST, space, **degrees)
        searches.run(whole, _REST if len(parts) > 1 else 1.0)
    return whole


def _firm_parts(searches: Searches, parts: dict[Degrees, TreeSearch], best: BestPlans) -> None:
    """Searches of the parts without what has loose bounds."""
    costs = searches.costs
    longer = _LONGER * min(1.0, _SMALL[0] / costs.num_blocks) * min(1.0, _SMALL[1] / searches.request.devices)
    rounds = [_OF_EXPERTS] if costs.has_experts else [(_SHARE, inf), (longer, longer)][: 1 + (longer > _SHARE)]
    for most, total in rounds:
        for part in sorted(parts.values(), key=lambda each: each.least):
            if total <= 0 or part.least >= best.limit:
                break
            total -= searches.run(part, min(most, total))


def _look(searches: Searches, best: BestPlans, part: float, space: Request, **degrees: Any) -> None:
    """A search of the plans with these values, where there may be some."""
    if all(space.allows(*each) for each in degrees.items()):
        searches.search(replace(space, fixed={**space.fixed, **degrees}), best, part, counts=False)


def _looks(searches: Searches, spaces: list[Request], leasts: dict[Degrees, float], best: BestPlans) -> None:
    """Searches of the parts whose bounds are least, in each of the spaces; the last has all of them."""
    opened: dict[Degrees, list[TreeSearch]] = {}
    for each, *most in _LOOKS:
        left = most[-len(spaces) :]
        for degrees in sorted(leasts, key=leasts.__getitem__):
            if leasts[degrees] == inf:
                break
            if degrees not in opened:
                fixed = [replace(space, fixed={**space.fixed, **dict(degrees)}) for space in spaces]
                opened[degrees] = [searches.open(of, best, counts=False) for of in fixed]
            for number, search in enumerate(opened[degrees]):
                if left[number] > 0:
                    left[number] -= searches.run(search, each)
                    leasts[degrees] = search.least if search is opened[degrees][-1] else leasts[degrees]
        if searches.are_near(best, min(leasts.values())):
            break
