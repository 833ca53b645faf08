"""Branch and bound over the space of configurations. No torch here.

Every node has a lower bound; nodes whose bound exceeds the best simulated values, less a tolerance, are discarded. The
node that looks best is expanded next (`pipeloom.plan.search.tree`). Parts of the space take turns
(`pipeloom.plan.search.parts`). A search ends after a number of steps, on few devices a large one. What is left then has
a bound too, which says by how much another plan could be faster at most.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from pipeloom.errors import InputError
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.parts.searches import Searches
from pipeloom.plan.search.parts.turns import take_turns
from pipeloom.plan.search.request import Objective, Refusals, Request
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space.groups import CanRun
from pipeloom.plan.search.tree.no_plan import no_plan
from pipeloom.plan.search.tree.tree_search import SLOWER, Tell

_COLLECTED = 1_000_000  # objects between two looks for cycles
_ENDED = "not looked at: the search ended"


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
    tell: Tell | None = None,
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
        tell: called again and again, with the configurations that were simulated and the best value so far.

    Raises:
        InputError: there is none.
    """
    begin = time.perf_counter()
    searches = Searches(costs, request, steps or Steps(costs), exhaustive, can_run, accept, part, tell)
    best, refusals = searches.best(known), Refusals()
    with rare_collections():
        if exhaustive or known:
            parts = [searches.open(request, best, refusals=refusals)]
            searches.run(parts[0])
        else:
            parts = searches.parts(best, refusals)
            take_turns(searches, parts, best)
        least = min((part.least for part in parts), default=inf)
        if not best.plans:
            smallest = searches.least_memory() if refusals.memory or least < inf else []
            if not smallest or smallest[0].peak > request.memory_bytes:
                raise InputError(no_plan(costs, request, refusals, smallest[0].peak if smallest else inf))
            best = searches.best(smallest)
            parts = [searches.open(request, best, counts=False, first=False, refusals=refusals)]  # now it ends
            searches.run(parts[0])
            least = parts[0].least
    for each in parts:
        refusals.add(SLOWER if each.least == inf else _ENDED, each.open)
    return Answer(
        objective=request.objective,
        plans=best.plans,
        refused=dict(refusals.reasons.most_common()),
        considered=refusals.considered + searches.simulated,
        simulated=searches.simulated,
        value=best.best_value,
        least=least,
        seconds=time.perf_counter() - begin,
    )


@contextmanager
def rare_collections() -> Iterator[None]:
    """A search makes millions of objects, few of them in cycles: looking for these would take a quarter of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECTED, *usual[1:])
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # to the oldest generation, else they would be looked at now
            gc.freeze()
            gc.unfreeze()
        gc.set_threshold(*usual)
