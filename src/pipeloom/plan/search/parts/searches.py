"""The searches of one request: what they share, and the parts of the space. No torch here."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space.groups import CanRun
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.tree_search import Tell, TreeSearch

_WITHOUT = 4.0  # more than its steps, of a search of the least memory on many devices, while it has no plan
_LEAN = ("1f1b", "v-min")  # schedules that hold the fewest activations
_SECOND = 0.1  # of the steps of a search, for the least memory where a plan with one of these is known
_LOOSE = {"offload": "offload_activations", "slices": "slices"}  # what plans take with them is far above their bounds


@dataclass
class Searches:
    """The searches of one request, see `pipeloom.plan.search.best_first.find_plans`.

    Attributes:
        simulated: configurations, by all of them.
    """

    costs: StepCosts
    request: Request
    steps: Steps
    exhaustive: bool
    can_run: CanRun
    accept: Callable[[Simulated], str | None]
    part: float
    tell: Tell | None
    simulated: int = 0

    def best(self, plans: Sequence[Simulated] = (), of: Request | None = None) -> BestPlans:
        """The best plans of searches that begin with these; of the request, or of one with another objective."""
        return BestPlans(of or self.request, self.accept, plans)

    def open(
        self,
        of: Request,
        best: BestPlans,
        *,
        counts: bool = True,
        first: bool = True,
        refusals: Refusals | None = None,
    ) -> TreeSearch:
        """A search that takes no steps yet; the arguments are those of `TreeSearch`."""
        return TreeSearch(
            *(self.steps, of, best),
            exhaustive=self.exhaustive,
            can_run=self.can_run,
            long_steps=self.exhaustive or "schedule" in self.request.fixed or not self.request.of_many,
            counts=counts,
            first=first,
            refusals=refusals,
        )

    def parts(self, best: BestPlans, refusals: Refusals) -> list[TreeSearch]:
        """A search of each part of the space, by the degrees that decide the most."""
        parts, seen = list[TreeSearch](), set[Any]()
        for degrees in self._degrees():
            of = replace(self.request, fixed={**self.request.fixed, **degrees})
            parts.append(self.open(of, best, first=degrees.get("expert") not in seen, refusals=refusals))
            seen.add(degrees.get("expert"))
        return parts

    def run(self, search: TreeSearch, part: float = 1.0, *, loose: bool = True, without: float = 0.0) -> float:
        """Search with a part of the steps, and more without a plan; the part that was taken."""
        before, tell, same = self.simulated - search.simulated, self.tell, search.objective == self.request.objective
        told = None if tell is None else lambda number, value: tell(before + number, value if same else inf)
        taken = search.run(self.part * part, loose=loose, without=self.part * without, tell=told)
        self.simulated = before + search.simulated
        return taken / self.part

    def _degrees(self) -> Iterator[dict[str, int]]:
        """The parts of the space, by the degrees that decide the most: a search that knows plans discards more."""
        request, costs = self.request, self.costs
        of_experts = [{"expert": expert} for expert in costs.expert_degrees] if costs.has_experts else [{}]
        for pipeline, expert in product(divisors(request.devices), of_experts):
            degrees = {"pipeline": pipeline, **expert}
            if pipeline <= costs.num_blocks and all(request.allows(*each) for each in degrees.items()):
                yield degrees

    @property
    def firm(self) -> Request:
        """The request, for plans that have none of `_LOOSE` that is not fixed."""
        loose = {forbidden for key, forbidden in _LOOSE.items() if key not in self.request.fixed}
        return replace(self.request, forbidden=self.request.forbidden | loose)

    def least_memory(self) -> list[Simulated]:
        """The plan that needs the least memory: plain ones are soon found, and discard most others."""
        any_memory = replace(self.request, memory_bytes=inf, objective="memory", top=1)
        fixed, best = self.request.fixed, self.best(of=any_memory)
        small = {} if {"microbatches", "microbatch_size"} & fixed.keys() else {"microbatch_size": 1}
        without = _WITHOUT if self.request.of_many else inf
        for schedule in [fixed["schedule"]] if "schedule" in fixed else _LEAN:
            kept = {"schedule": schedule, **small, **fixed}
            few = replace(any_memory, fixed=kept, forbidden=self.firm.forbidden)
            without -= max(0.0, self.run(self.open(few, best, counts=False), without=without) - 1)
        self.run(self.open(any_memory, best, counts=False), _SECOND if best.plans else 1.0, without=inf)
        return best.plans
