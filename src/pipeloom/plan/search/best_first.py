"""Branch and bound over the space of configurations. No torch here.

Every node has a lower bound; nodes whose bound exceeds the best simulated values, less a tolerance, are discarded. The
node that looks best is expanded next (`pipeloom.plan.search.tree`). A search ends after a number of steps,
on few devices a large one. What is left then has a bound too, which says by how much another plan could be faster at
most.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.ir.data_axis import Granularity
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Objective, Request
from pipeloom.plan.search.shapes import MANY_DEVICES
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space import CanRun
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.no_plan import no_plan
from pipeloom.plan.search.tree.tree_search import TreeSearch

_COLLECTED = 1_000_000  # objects between two looks for cycles
_NEAR = 1.12  # of the bound of what is left: no second looks
_FAR = 1.25  # from the bound of what is left: a search goes on, as where nothing is left
_FIRST_LOOK = 0.01  # of the steps of a search; it goes on until there is a plan
# On many devices, where a search ends early: of its steps, for each pipeline degree and for all of them, then again where
# the best plan is still far from the bounds; and for the rest.
_LOOKS, _REST = ((0.4, 1.6), (1.0, 2.0)), 0.2
_LOOSE = frozenset({"offload", "offload_states", "slices"})  # what plans take with them is far above their bounds


@dataclass(kw_only=True)
class Answer:
    """What a search found.

    Attributes:
        objective: what is minimized.
        plans: best first.
        refused: configurations by reason.
        considered: configurations that were refused, discarded by their bound, or simulated.
        simulated: number of simulated ones.
        value: what is minimized, of the best plan.
        least: no configuration that was not looked at is below it; infinite where none is left.
        seconds: of the search.
    """

    objective: Objective = "time"
    plans: list[Simulated] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    considered: int = 0
    simulated: int = 0
    value: float = inf
    least: float = inf
    seconds: float = 0.0


def find_plans(
    costs: StepCosts,
    request: Request,
    *,
    exhaustive: bool = False,
    can_run: CanRun = lambda _: None,
    accept: Callable[[Simulated], str | None] = lambda _: None,
    known: Sequence[Simulated] = (),
    part: float = 1.0,
    steps: Steps | None = None,
) -> Answer:
    """The best plans.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        exhaustive: whether to simulate all configurations.
        can_run: why the processes of a stage cannot run the model; None: they can. Asked early, for each way to share
            a stage.
        accept: why a plan cannot be offered; None: it can. Asked for plans that would be among the best.
        known: plans of the request; nothing that is not faster is looked at.
        part: of the steps after which a search ends.
        steps: of an earlier search with these costs, whose results are used again.

    Raises:
        InputError: there is none.
    """
    begin, steps, simulated = time.perf_counter(), steps or Steps(costs), 0
    many = request.devices > MANY_DEVICES and not exhaustive
    coarse = (
        many and "data_granularity" not in request.fixed and request.objective != "memory"
    )  # finer granularities need less
    first = replace(request, fixed={**request.fixed, "data_granularity": Granularity.STEP}) if coarse else request

    def searched(of: Request, plans: Sequence[Simulated], part: float = part) -> tuple[TreeSearch, BestPlans]:
        best = BestPlans(of, accept, plans)
        search = TreeSearch(steps, of, best, exhaustive=exhaustive, can_run=can_run, part=part)
        search.run()
        return search, best

    def looked(of: Request, plans: Sequence[Simulated], part: float) -> tuple[TreeSearch, BestPlans]:
        best = BestPlans(request, accept, plans)
        look = TreeSearch(steps, of, best, exhaustive=False, can_run=can_run, part=part, counts=False)
        look.run()
        return look, best

    with rare_collections():
        best, rest = list(known), part
        if not known and not exhaustive:
            least_of: dict[int, float] = {}
            for few in _first_looks(request, costs.num_blocks):
                look, found = looked(few, best, _FIRST_LOOK)
                simulated, best = simulated + look.simulated, found.plans
                least_of[few.fixed["pipeline"]] = look.least
            if many and len(least_of) > 1:
                rest = _REST * part
                for each, most in _LOOKS:
                    left = most * part
                    for pipeline in sorted(least_of, key=lambda degree: least_of[degree]):
                        for of in (first, request) if coarse else (request,):
                            if left <= 0 or least_of[pipeline] == inf:
                                break
                            of = replace(of, fixed={**of.fixed, "pipeline": pipeline})
                            look, found = looked(of, best, each * part)
                            simulated, best, left = simulated + look.simulated, found.plans, left - look.taken
                            least = look.least
                        least_of[pipeline] = least
                    if best and found.value(best[0]) <= _NEAR * min(least_of.values()):
                        break
        search, found = searched(first, best, rest)
        far = not found.plans or search.least == inf or found.value(found.plans[0]) > _FAR * search.least
        if coarse and (far if rest == part else not found.plans):  # finer granularities need less memory, and hide less
            simulated += search.simulated
            search, found = searched(request, found.plans)
        if not found.plans:
            least: Sequence[Simulated] = ()
            if search.refusals.least_bytes < inf:
                least = searched(replace(request, memory_bytes=inf, objective="memory", top=1), ())[1].plans
            if not least or least[0].peak > request.memory_bytes:
                raise InputError(no_plan(costs, request, search.refusals, least[0].peak if least else inf))
            found.plans = [*least]  # closed forms of memory with offload led to none that fits
    simulated += search.simulated
    return Answer(
        objective=request.objective,
        plans=found.plans,
        refused=dict(search.refusals.reasons.most_common()),
        considered=search.refusals.considered + simulated,
        simulated=simulated,
        value=found.value(found.plans[0]),
        least=search.least,
        seconds=time.perf_counter() - begin,
    )


def _first_looks(request: Request, layers: int) -> Iterator[Request]:
    """Small parts of the space, one for each pipeline degree: with a plan of each, the search discards more.

    Where memory is short, the search would else end among plans that offload, whose bounds are too low.
    """
    forbidden = request.forbidden | (_LOOSE - request.fixed.keys())
    for pipeline in divisors(request.devices):
        if pipeline <= layers and request.allows("pipeline", pipeline):
            yield replace(request, fixed={**request.fixed, "pipeline": pipeline}, forbidden=forbidden)


@contextmanager
def rare_collections() -> Iterator[None]:
    """A search makes millions of objects, few of them in cycles: looking for these would take a quarter of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECTED, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
