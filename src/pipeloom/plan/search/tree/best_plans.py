"""The best plans that a search has found. No torch here."""

from collections.abc import Callable, Sequence
from math import inf

from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.request import Request, score
from pipeloom.plan.search.simulated import Simulated

_TOLERANCE = 0.005  # of values: a configuration has to be better by more


class BestPlans:
    """The best plans, best first, of which no two are of one kind.

    Args:
        request: what is planned.
        accept: why a plan cannot be offered; None: it can.
        plans: those that are known.

    Attributes:
        plans: those that were kept.
        best_value: what is minimized, of the best plan; infinite without one.
        limit: the value above which a plan is not among the best.
    """

    def __init__(self, request: Request, accept: Callable[[Simulated], str | None], plans: Sequence[Simulated]) -> None:
        self._request, self._accept = request, accept
        self._keep(plans)

    def _keep(self, plans: Sequence[Simulated]) -> None:
        self.plans, top = list(plans), self._request.top
        self.best_value = self.value(self.plans[0]) if self.plans else inf
        self._last = self.value(self.plans[top - 1]) if len(self.plans) >= top else inf
        self.limit = (1 - _TOLERANCE) * self._last

    def score(self, seconds: float, peak: float, devices: int) -> float:
        """What is minimized, of a step with these seconds and this peak memory."""
        return score(self._request.objective, seconds, peak, devices)

    def value(self, plan: Simulated) -> float:
        """What is minimized, of a plan."""
        return self.score(plan.step_seconds, plan.peak, plan.of.devices)

    def add(self, found: Simulated) -> str | None:
        """Keep a plan that is among the best, in place of a worse one of its kind; why it cannot be offered."""
        if self.value(found) >= self._last or self.value(found := found.settled()) >= self._last:
            return None
        if (refusal := self._accept(found)) is not None:
            return refusal
        # Of a kind, the fastest stays; of those as fast, the one with the fewest stages.
        both = sorted([found, *self.plans], key=lambda plan: (self.value(plan), plan.of.chunks), reverse=True)
        unlike = {_kind(plan.of): plan for plan in both}.values()
        self._keep(sorted(unlike, key=self.value)[: self._request.top])
        return None


def _kind(of: Configuration) -> tuple[object, ...]:
    """What plans that are shown side by side differ in; not in the stages of ranks without a pipeline."""
    stages = (of.chunks, of.schedule) if of.pipeline > 1 else ()
    return of.inside, of.pipeline, of.data, of.slices, of.microbatch_size, stages, of.precision.dtype
