"""Best-first branch and bound over the space of configurations. No torch here.

The node with the least bound is expanded next; a configuration is simulated when it is the least. The search ends when
the least bound exceeds the best simulated values, less a tolerance, so none that is left is better by more than that.
"""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.search.memory_choice import in_flight, memory_choices
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.simulated import Simulated, short_microbatches, simulated
from pipeloom.plan.search.space import Shape, Space, pipeline_seconds

_TOLERANCE = 0.005
Way = tuple[Configuration, float]  # a mesh with a data strategy, and the seconds of a step at least


@dataclass(kw_only=True)
class Answer:
    """What a search found.

    Attributes:
        plans: best first.
        refused: configurations by reason.
        considered: configurations that were refused, discarded by their bound, or simulated.
        simulated: number of simulated ones.
        next_best: the fastest configuration that was refused for its memory, and the bytes that it needs.
        seconds: of the search.
    """

    plans: list[Simulated] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    considered: int = 0
    simulated: int = 0
    next_best: tuple[float, float, Configuration] | None = None
    seconds: float = 0.0


def find_plans(
    costs: CostModel,
    request: Request,
    *,
    exhaustive: bool = False,
    accept: Callable[[Simulated], str | None] = lambda _: None,
) -> Answer:
    """The best plans.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        exhaustive: whether to simulate all configurations.
        accept: why a plan cannot be offered; None: it can.

    Raises:
        InputError: there is none.
    """
    begin = time.perf_counter()
    search = _Search(costs, request, exhaustive, accept)
    search.run()
    answer = search.answer
    answer.refused = dict(search.refusals.reasons.most_common())
    answer.considered = search.refusals.considered + answer.simulated
    answer.seconds = time.perf_counter() - begin
    if not answer.plans:
        raise InputError(_none(request, search))
    return answer


def _none(request: Request, search: "_Search") -> str:
    """Why there is no plan."""
    asked = f"--devices={request.devices} --batch.size={request.batch_size}"
    if search.refusals.least_bytes < float("inf"):
        missing = search.refusals.least_bytes - request.memory_bytes
        return (
            f"{asked}: no plan fits into {request.memory_bytes / 2**30:.4g} GiB per device; the least found needs "
            f"{missing / 2**30:.3g} GiB more. Use more devices, or devices with more memory."
        )
    reasons = "; ".join(f"{reason} ({number})" for reason, number in search.refusals.reasons.most_common(3))
    return f"{asked}: no plan can run: {reasons}. Change devices, batch or --fix."


class _Search:
    """The heap and the best so far."""

    def __init__(
        self, costs: CostModel, request: Request, exhaustive: bool, accept: Callable[[Simulated], str | None]
    ) -> None:
        self.costs, self.request, self.exhaustive, self.accept = costs, request, exhaustive, accept
        self.refusals, self.answer = Refusals(), Answer()
        self.space = Space(costs, request, self.refusals)
        self._heap: list[tuple[float, int, int, Callable[..., Iterator[Any]], tuple[Any, ...]]] = []
        self._number = count()

    def run(self) -> None:
        for of, devices in self.space.groups():
            self._push(self._score(self.space.group_bound(of, devices), of, devices), 0, self._meshes, of, devices)
        while self._heap:
            bound, _, _, expand, node = heapq.heappop(self._heap)
            if bound >= self._most() and not self.exhaustive:
                self.refusals.add("slower than the best plans by a lower bound", len(self._heap) + 1)
                break
            expand(*node)

    def _score(self, seconds: float, of: Configuration, devices: int, peak: float = 0.0) -> float:
        match self.request.objective:
            case "memory":
                return peak
            case "cost":
                return seconds * devices
            case _:
                return seconds

    def _most(self) -> float:
        """The value above which a plan is not among the best."""
        plans, top = self.answer.plans, self.request.top
        return self._value(plans[top - 1]) * (1 - _TOLERANCE) if len(plans) >= top else float("inf")

    def _value(self, plan: Simulated) -> float:
        return self._score(plan.step_seconds, plan.of, plan.of.devices, max(plan.peak_bytes))

    def _push(self, bound: float, level: int, expand: Callable[..., Any], *node: Any) -> None:
        if bound < self._most() or self.exhaustive:
            heapq.heappush(self._heap, (bound, -level, next(self._number), expand, node))
        else:
            self.refusals.add("slower than the best plans by a lower bound")

    def _meshes(self, of: Configuration, devices: int) -> None:
        for mesh in self.space.meshes(of, devices):
            ways = list(self.space.ways(mesh))
            if ways:
                least = min(seconds for _, seconds in ways)
                self._push(self._score(least, mesh, devices), 1, self._shapes, mesh, ways)

    def _shapes(self, of: Configuration, ways: Sequence[Way]) -> None:
        least = min(seconds for _, seconds in ways)
        for shape in self.space.shapes(of):
            seconds = max(least, self.space.shape_bound(shape))
            self._push(self._score(seconds, shape.of, shape.of.devices), 2, self._choices, shape, ways)

    def _choices(self, shape: Shape, ways: Sequence[Way]) -> None:
        of = shape.of
        number, _ = short_microbatches(of, len(of.blocks or ()))
        try:
            live = in_flight(of.schedule, of.pipeline, number, of.chunks, of.slices)
        except PipeloomError:
            self.refusals.add("the schedule does not support the sizes")
            return
        seen: set[Recompute | Sequence[Recompute]] = set()
        for way, least in ways:
            each = shape._replace(of=replace(of, strategy=way.strategy, granularity=way.granularity))
            for chosen in memory_choices(self.costs, each, live, self.request):
                if chosen.recompute in seen and way.strategy.shards_gradients and self.request.objective != "memory":
                    continue  # an earlier way communicates less
                seen.add(chosen.recompute)
                seconds = pipeline_seconds(self.costs, shape._replace(of=chosen))
                seconds = max(least, seconds + self.costs.update_seconds(chosen, shape.placement.stages_of))
                self._push(self._score(seconds, chosen, chosen.devices), 3, self._simulate, chosen)
        if not seen:
            self.refusals.too_large(float("inf"))

    def _simulate(self, of: Configuration) -> None:
        try:
            found = simulated(self.costs, of)
        except PipeloomError:
            self.refusals.add("the schedule does not support the sizes")
            return
        self.answer.simulated += 1
        peak = max(found.peak_bytes)
        if peak > self.request.memory_bytes:
            self.refusals.too_large(peak)
            seen = self.answer.next_best
            if seen is None or found.step_seconds < seen[0]:
                self.answer.next_best = (found.step_seconds, peak, of)
            return
        refusal = self.accept(found)
        if refusal is not None:
            self.refusals.add(refusal)
            return
        self.answer.plans.append(found)
        self.answer.plans.sort(key=self._value)
        del self.answer.plans[self.request.top :]
