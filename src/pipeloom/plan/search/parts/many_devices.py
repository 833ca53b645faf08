"""The searches of a request on many devices, which look at few shapes. No torch here."""

from dataclasses import replace
from itertools import product
from math import inf

from pipeloom.ir.data_axis import Granularity
from pipeloom.plan.search.parts.searches import Degrees, Searches
from pipeloom.plan.search.request import Refusals
from pipeloom.plan.search.space import MOST_TENSOR
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import TreeSearch

# Of the steps of a search, for each part of the space and for all of them, then again where the best plan is still far
# from the bounds.
_LOOKS = (0.2, 0.8), (1.0, 2.0)
_AROUND = 0.5  # the same, for each neighbour of the best plan's pipeline and tensor-parallel degrees
_REST = 0.2  # of the steps of a search of all, behind those of parts
_FAR = 1.25  # from the bound of what is left: a search goes on, as where nothing is left


def search_many(searches: Searches, best: BestPlans, refusals: Refusals) -> TreeSearch:
    """Search the parts of the space whose bounds are least, then all of it.

    Args:
        searches: of the request.
        best: plans that are known; it is changed.
        refusals: to which those of the returned search are added.

    Returns:
        The search of the whole space.
    """
    request, rest = searches.request, 1.0
    coarse = "data_granularity" not in request.fixed and request.objective != "memory"  # finer ones need less
    first = replace(request, fixed={**request.fixed, "data_granularity": Granularity.STEP}) if coarse else request
    parts = searches.first_looks(best)
    if best.plans and len(parts) > 1:  # else all plans offload, and these bounds say little about them
        rest = _REST
        _look_at_parts(searches, parts, best)
    search = searches.search(first, best, rest, refusals=refusals)
    far = not best.plans or search.least == inf or best.best_value > _FAR * search.least
    if coarse and (far if rest == 1.0 else not best.plans):  # finer granularities need less memory, and hide less
        search = searches.search(request, best, refusals=refusals)
    return search


def _look_at_parts(searches: Searches, parts: dict[Degrees, TreeSearch], best: BestPlans) -> None:
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
    seen, start = set[tuple[int, int]](), None
    while start is not best.plans[0] and not searches.are_near(best, least):
        start = best.plans[0]
        pipeline, tensor = start.of.pipeline, start.of.inside.tensor
        for degrees in product((pipeline // 2, pipeline, 2 * pipeline), (tensor // 2, tensor, 2 * tensor)):
            if degrees not in seen and not searches.are_near(best, least):
                seen.add(degrees)
                _look(searches, *degrees, best)


def _look(searches: Searches, pipeline: int, tensor: int, best: BestPlans) -> None:
    """A search of two degrees, where plans may have them."""
    costs, space, degrees = searches.costs, searches.request, {"pipeline": pipeline, "tensor": tensor}
    most = max(MOST_TENSOR, costs.cluster.devices_per_node)
    possible = 0 < pipeline <= costs.num_blocks and 0 < tensor <= most
    if not possible or space.devices % (pipeline * tensor):
        return
    if all(space.allows(*each) for each in degrees.items()):
        searches.search(replace(space, fixed={**space.fixed, **degrees}), best, _AROUND, counts=False)
