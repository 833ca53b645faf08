"""Branch and bound over the space of configurations. No torch here.

Every node has a lower bound; nodes whose bound exceeds the best simulated values, less a tolerance, are discarded. The
node that looks best is expanded next (`pipeloom.plan.search.tree`). A search ends after a number of steps,
on few devices a large one. What is left then has a bound too, which says by how much another plan could be faster at
most.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Any

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Objective, Request
from pipeloom.plan.search.shapes import MANY_DEVICES
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space import MOST_TENSOR, CanRun
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.no_plan import no_plan
from pipeloom.plan.search.tree.tree_search import Tell, TreeSearch

_COLLECTED = 1_000_000  # objects between two looks for cycles
_NEAR = 1.12  # of the bound of what is left: no second looks
_FAR = 1.25  # from the bound of what is left: a search goes on, as where nothing is left
_FIRST_LOOK = 0.01  # of the steps of a search; it goes on until there is a plan
# Of the steps of a search, for each part of the space and for all of them, then again where the best plan is still far
# from the bounds; and for the search of all that follows. On many devices, and on few, where a search has more steps.
_MANY_LOOKS, _MANY_REST = ((0.2, 0.8), (1.0, 2.0)), 0.2
_FEW_LOOKS, _FEW_REST = ((0.04, 0.2), (0.1, 0.2)), 0.15
# The same, for each pipeline degree without what has loose bounds, on few devices; and of models with so many blocks on
# so many devices, for all of them in a second round. With more of both, there are more steps, and each takes longer.
_SHARE, _LONGER, _SMALL = 0.15, 2.0, (12, 8)
_BESIDE = 0.04  # the same, for each tensor-parallel degree beside the best plan's pipeline, on few devices
# The same, on many devices, for each neighbour of the best plan's pipeline and tensor-parallel degrees, and for several
# stages on ranks without a pipeline; of these also where the best plan is near the bounds.
_AROUND, _NEAR_AROUND = 0.3, 0.2
_WITHOUT = 4.0  # more than the steps of a search, of all searches on many devices, while there is no plan
_LEAN = ("1f1b", "v-min")  # schedules that hold the fewest activations
_SECOND = 0.1  # of the steps of a search, for the least memory where a plan with one of these is known
_LOOSE = frozenset({"offload", "offload_states", "slices"})  # what plans take with them is far above their bounds


_Degrees = tuple[tuple[str, int], ...]  # of a part of the space, by name


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
    searches = _Searches(costs, request, steps or Steps(costs), exhaustive, can_run, accept, part, tell)
    many = request.devices > MANY_DEVICES and not exhaustive
    coarse = many and "data_granularity" not in request.fixed and request.objective != "memory"  # finer ones need less
    first = replace(request, fixed={**request.fixed, "data_granularity": Granularity.STEP}) if coarse else request
    whole = {"context", "slices"} - request.fixed.keys() - request.forbidden  # sequences, as most plans have them
    usual = first if coarse else replace(request, fixed={**request.fixed, **dict.fromkeys(whole, 1)})
    with rare_collections():
        best, rest, settled = list(known), 1.0, False
        if not known and not exhaustive:
            leasts, best = searches.first_looks()
            firm = dict(leasts)
            if len(leasts) > 1 and best:  # else all plans offload, and these bounds say little about them
                rest = _MANY_REST if many else _FEW_REST
                if not many:  # most searches settle all there is to know about few devices
                    search, found = searches.search(request, best, rest)
                    best, settled = found.plans, search.least == inf
                if not settled:
                    best = best if many else searches.looks_without_loose(firm, best)
                    best = searches.looks([request] if usual == request else [usual, request], leasts, best)
                    best = searches.looks_around(leasts, best) if many else searches.looks_beside(usual, best)
        if not settled:
            search, found = searches.search(first, best, rest)
        far = not found.plans or search.least == inf or found.value(found.plans[0]) > _FAR * search.least
        if coarse and (far if rest == 1.0 else not found.plans):  # finer granularities need less memory, and hide less
            search, found = searches.search(request, found.plans)
        if found.plans and not exhaustive:
            search, found = searches.with_stages(search, found)
        if not found.plans:
            refusals, least = search.refusals, list[Simulated]()
            if refusals.memory or search.least < inf:
                least = searches.least_memory()
            if not least or least[0].peak > request.memory_bytes:
                raise InputError(no_plan(costs, request, refusals, least[0].peak if least else inf))
            search, found = searches.search(request, least)  # with a plan to compare with, it ends
    return Answer(
        objective=request.objective,
        plans=found.plans,
        refused=dict(search.refusals.reasons.most_common()),
        considered=search.refusals.considered + searches.simulated,
        simulated=searches.simulated,
        value=found.value(found.plans[0]),
        least=search.least,
        seconds=time.perf_counter() - begin,
    )


@dataclass
class _Searches:
    """The searches of one request, see `find_plans`.

    Attributes:
        simulated: configurations, by all of them.
        without: of the steps of a search, what is left of `_WITHOUT`.
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
    without: float = field(init=False)

    def __post_init__(self) -> None:
        self.without = _WITHOUT if self.request.devices > MANY_DEVICES and not self.exhaustive else inf

    def search(
        self, of: Request, plans: Sequence[Simulated], part: float = 1.0, *, counts: bool = True
    ) -> tuple[TreeSearch, BestPlans]:
        """Search with a part of the steps, where plans are known; `counts` as for `TreeSearch`."""
        best, before, tell = BestPlans(of, self.accept, plans), self.simulated, self.tell
        same = of.objective == self.request.objective
        search = TreeSearch(
            *(self.steps, of, best),
            exhaustive=self.exhaustive,
            can_run=self.can_run,
            part=self.part * part,
            long_steps=self.exhaustive or "schedule" in self.request.fixed or self.request.devices <= MANY_DEVICES,
            without=self.without,
            counts=counts,
            tell=None if tell is None else lambda number, value: tell(before + number, value if same else inf),
        )
        search.run()
        if not best.plans:
            self.without -= max(0.0, search.taken - self.part * part)
        self.simulated += search.simulated
        return search, best

    def first_looks(self) -> tuple[dict[_Degrees, float], list[Simulated]]:
        """A short look at each part of the space: the bounds of what is left there, and the best plans.

        Where memory is short, a search would else end among plans that offload, whose bounds are too low.
        """
        leasts, best, request = dict[_Degrees, float](), list[Simulated](), self.request
        for degrees in _degrees(request, self.costs):
            few = replace(request, fixed={**request.fixed, **dict(degrees)}, forbidden=self._without_loose)
            look, found = self.search(few, best, _FIRST_LOOK / self.part, counts=False)
            leasts[degrees], best = look.least, found.plans
        return leasts, best

    def with_stages(self, search: TreeSearch, found: BestPlans) -> tuple[TreeSearch, BestPlans]:
        """The same plans, or better ones where a rank that recomputes has several stages, and some of them do not.

        Without a pipeline, all other plans of the space have one stage.

        Args:
            search: that found the plans.
            found: the plans, at least one.
        """
        of, fixed = found.plans[0].of, self.request.fixed
        given = {"schedule", "chunks", "recompute"}
        if of.pipeline > 1 or of.recompute_of(0) is Recompute.NONE or given & (fixed.keys() | self.request.forbidden):
            return search, found
        inside = {"tensor": of.inside.tensor, "context": of.inside.context, "expert": of.inside.expert}
        alike = {**inside, "pipeline": 1, "microbatch_size": of.microbatch_size, "schedule": "interleaved", **fixed}
        _, better = self.search(replace(self.request, fixed=alike), found.plans, counts=False)
        return search, better

    def least_memory(self) -> list[Simulated]:
        """The plan that needs the least memory: plain ones are soon found, and discard most others."""
        any_memory = replace(self.request, memory_bytes=inf, objective="memory", top=1)
        fixed, found = self.request.fixed, list[Simulated]()
        small = {} if {"microbatches", "microbatch_size"} & fixed.keys() else {"microbatch_size": 1}
        for schedule in _LEAN:
            kept = replace(any_memory, fixed={"schedule": schedule, **small, **fixed}, forbidden=self._without_loose)
            found = self.search(kept, found, counts=False)[1].plans
        self.without = inf
        return self.search(any_memory, found, _SECOND if found else 1.0)[1].plans

    @property
    def _without_loose(self) -> frozenset[str]:
        """What is forbidden where plans have none of `_LOOSE` that is not fixed."""
        return self.request.forbidden | (_LOOSE - self.request.fixed.keys())

    def looks(self, spaces: Sequence[Request], leasts: dict[_Degrees, float], best: list[Simulated]) -> list[Simulated]:
        """The best plans after longer looks at the parts whose bounds are least.

        A search of all would take its steps in few of them, and end.

        Args:
            spaces: where to look, one after another; the last alone, once it led to the best plan.
            leasts: of each part, the bound of what is left; it is changed.
            best: plans that are known, at least one.
        """
        many = self.request.devices > MANY_DEVICES
        for each, most in _MANY_LOOKS if many else _FEW_LOOKS:
            left = most if many else most * len(spaces)
            for degrees in sorted(leasts, key=lambda part: leasts[part]):
                if left <= 0 or leasts[degrees] == inf:
                    break
                for space in spaces:
                    of = replace(space, fixed={**space.fixed, **dict(degrees)})
                    look, found = self.search(of, best, each, counts=False)
                    better, best, left = found.plans[0] is not best[0], found.plans, left - look.taken / self.part
                leasts[degrees] = look.least
                spaces = spaces[-1:] if better else spaces
            if self._are_near(best, leasts):
                break
        return best

    def _are_near(self, best: list[Simulated], leasts: dict[_Degrees, float]) -> bool:
        return BestPlans(self.request, self.accept, best).value(best[0]) <= _NEAR * min(leasts.values())

    def looks_beside(self, space: Request, best: list[Simulated]) -> list[Simulated]:
        """The best plans after a short look at each tensor-parallel degree beside the best plan's pipeline."""
        pipeline = best[0].of.pipeline
        for tensor in divisors(self.request.devices // pipeline):
            best = self._look(space, pipeline, tensor, _BESIDE, best)
        return best

    def looks_without_loose(self, leasts: Mapping[_Degrees, float], best: list[Simulated]) -> list[Simulated]:
        """The best plans after more looks without `_LOOSE`: at pipeline degrees, at the best plan's degrees, and at
        several stages on ranks without a pipeline.

        Args:
            leasts: of each part, the bound that its first look left.
            best: plans that are known, at least one.
        """

        def look(part: float, **degrees: Any) -> tuple[TreeSearch | None, list[Simulated]]:
            if not all(self.request.allows(*each) for each in degrees.items()):
                return None, best
            of = replace(self.request, fixed={**self.request.fixed, **degrees}, forbidden=self._without_loose)
            search, found = self.search(of, best, part, counts=False)
            return search, found.plans

        left: dict[int, float] = {}  # of each pipeline degree, the bound of what is left
        for part, bound in leasts.items():
            pipeline = dict(part)["pipeline"]
            left[pipeline] = min(bound, left.get(pipeline, inf))
        blocks, devices = self.costs.num_blocks, self.request.devices
        longer = _LONGER * min(1.0, _SMALL[0] / blocks) * min(1.0, _SMALL[1] / devices)
        for most, total in ((_SHARE, inf), (longer, longer)) if longer > _SHARE else ((_SHARE, inf),):
            for pipeline in sorted(left, key=lambda each: left[each]):
                if total <= 0 or left[pipeline] >= BestPlans(self.request, self.accept, best).value(best[0]):
                    break
                search, best = look(min(most, total), pipeline=pipeline)
                if search is not None:
                    left[pipeline] = search.least
                    total -= search.taken / self.part
        if self.costs.has_experts:
            _, best = look(_SHARE, pipeline=best[0].of.pipeline, expert=best[0].of.inside.expert)
        return look(_SHARE, pipeline=1, schedule="interleaved", expert=best[0].of.inside.expert)[1]

    def looks_around(self, leasts: dict[_Degrees, float], best: list[Simulated]) -> list[Simulated]:
        """The best plans after looks at the neighbours of the best plan, and at those of each that is better.

        Neighbours have half, once or twice its pipeline and tensor-parallel degrees. The bounds of most parts are below
        any plan there: a search of one pipeline degree ends before it has looked at each tensor-parallel degree.

        Args:
            leasts: of each part, the bound of what is left.
            best: plans that are known, at least one.
        """
        several = replace(self.request, fixed={**self.request.fixed, "schedule": "interleaved"})
        has_several = self.request.allows("schedule", "interleaved")
        seen, start = set[tuple[int, int]](), None
        while start is not best[0]:
            start = best[0]
            pipeline, tensor = start.of.pipeline, start.of.inside.tensor
            for degrees in product((pipeline // 2, pipeline, 2 * pipeline), (tensor // 2, tensor, 2 * tensor)):
                if degrees in seen:
                    continue
                seen.add(degrees)
                near = self._are_near(best, leasts)
                if not near:
                    best = self._look(self.request, *degrees, _AROUND, best)
                if degrees[0] == 1 and has_several:
                    best = self._look(several, *degrees, _NEAR_AROUND if near else _AROUND, best)
        return best

    def _look(self, space: Request, pipeline: int, tensor: int, part: float, best: list[Simulated]) -> list[Simulated]:
        """The best plans after a look at two degrees with a part of the steps, where plans may have them."""
        most, degrees = max(MOST_TENSOR, self.costs.cluster.devices_per_node), {"pipeline": pipeline, "tensor": tensor}
        possible = 0 < pipeline <= self.costs.num_blocks and 0 < tensor <= most
        if not possible or self.request.devices % (pipeline * tensor):
            return best
        if not all(space.allows(*each) for each in degrees.items()):
            return best
        of = replace(space, fixed={**space.fixed, **degrees})
        return self.search(of, best, part, counts=False)[1].plans


def _degrees(request: Request, costs: StepCosts) -> Iterator[_Degrees]:
    """The parts of the space, by the degrees that decide the most: a search that knows a plan of each discards more."""
    of_experts = divisors(request.devices) if costs.has_experts else [None]
    for pipeline, expert in product(divisors(request.devices), of_experts):
        degrees = [("pipeline", pipeline)] if expert is None else [("pipeline", pipeline), ("expert", expert)]
        if pipeline <= costs.num_blocks and all(request.allows(*each) for each in degrees):
            yield tuple(degrees)


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
