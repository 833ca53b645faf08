"""The searches of a request on many devices, which look at few shapes. No torch here."""

from dataclasses import replace
from itertools import product
from math import inf

from pipeloom.plan.search.parts.searches import Degrees, Searches
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.space import MOST_TENSOR
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch

# Of the steps of a search, for each part of the space and for all of them, then again where the best plan is still far
# from the bounds.
_LOOKS = (0.2, 0.8), (1.0, 2.0)
# The same, for each neighbour of the best plan's pipeline and tensor-parallel degrees, and for several stages on ranks
# without a pipeline; of these also where the best plan is near the bounds.
_AROUND, _NEAR_AROUND = 0.5, 0.3


def look_at_many(searches: Searches, parts: dict[Degrees, TreeSearch], best: BestPlans) -> None:
    """Searches of the parts whose bounds are least, and of neighbours of the best plan.

    Args:
        searches: of the request.
        parts: of the space, after a first look at each.
        best: plans that are known, at least one; it is changed.
    """
    leasts = {degrees: part.least for degrees, part in parts.items()}
    for each, most in _LOOKS:
        left = most
        for degrees in sorted(leasts, key=leasts.__getitem__):
            if left <= 0 or leasts[degrees] == inf:
                break
            of = replace(searches.request, fixed={**searches.request.fixed, **dict(degrees)})
            look = searches.open(of, best, counts=False)
            left -= searches.run(look, each)
            leasts[degrees] = look.least
        if searches.are_near(best, min(leasts.values())):
            break
    _look_around(searches, min(leasts.values()), best)


def _look_around(searches: Searches, least: float, best: BestPlans) -> None:
    """Searches of the neighbours of the best plan, and of those of each that is better.

    Neighbours have half, once or twice its pipeline and tensor-parallel degrees. The bounds of most parts are below
    any plan there: a search of one pipeline degree ends before it has looked at each tensor-parallel degree.
    """
    request = searches.request
    several = replace(request, fixed={**request.fixed, "schedule": "interleaved"})
    has_several = request.allows("schedule", "interleaved")
    seen, start = set[tuple[int, int]](), None
    while start is not best.plans[0]:
        start = best.plans[0]
        pipeline, tensor = start.of.pipeline, start.of.inside.tensor
        for degrees in product((pipeline // 2, pipeline, 2 * pipeline), (tensor // 2, tensor, 2 * tensor)):
            if degrees in seen:
                continue
            seen.add(degrees)
            near = searches.are_near(best, least)
            if not near:
                _look(searches, request, *degrees, _AROUND, best)
            if degrees[0] == 1 and has_several:
                _look(searches, several, *degrees, _NEAR_AROUND if near else _AROUND, best)


def _look(searches: Searches, space: Request, pipeline: int, tensor: int, part: float, best: BestPlans) -> None:
    """A search of two degrees with a part of the steps, where plans may have them."""
    costs, degrees = searches.costs, {"pipeline": pipeline, "tensor": tensor}
    most = max(MOST_TENSOR, costs.cluster.devices_per_node)
    possible = 0 < pipeline <= costs.num_blocks and 0 < tensor <= most
    if not possible or space.devices % (pipeline * tensor):
        return
    if all(space.allows(*each) for each in degrees.items()):
        searches.search(replace(space, fixed={**space.fixed, **degrees}), best, part, counts=False)
