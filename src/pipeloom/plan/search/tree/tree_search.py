"""Expansion of nodes: from groups to meshes, shapes and candidates, see `pipeloom.plan.search.space`. No torch here."""

from collections.abc import Callable, Hashable, Sequence
from math import inf
from typing import Any

from pipeloom.errors import PipeloomError
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.memory.live_moments import Moments, moments_of
from pipeloom.plan.search.memory.memory_choice import MemoryChoices
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.shapes import MANY_DEVICES, Shape, same_bound
from pipeloom.plan.search.short_steps import order_number, simulated_actions
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space import PENALTIES, CanRun, Space, Way, Ways
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.candidates import SIZES, Candidate, Candidates
from pipeloom.plan.search.tree.open_nodes import Node, OpenNodes

Tell = Callable[[int, float], None]
_WEIGHTS = (0.2, 1.0, 0.5, 3.0)  # of steps, by level
_REFUSED = 0.25  # of them, which shapes do not take where a look at their data strategies refuses them
_MOST_ACTIONS = 60_000  # of a simulated step on many devices
_ACTIONS = 300  # of a simulated step, that count as one of the search
_STEPS = 85  # on `MANY_DEVICES` devices
_MOST_STEPS = 4_000.0  # on at most as many; models with experts and long sequences would take many times more
_OF_WAY = "strategy", "granularity", "offload_states"
_SLOWER = "slower than the best plans by a lower bound"


def _steps(devices: int) -> float:
    """After which a search ends."""
    return _MOST_STEPS if devices <= MANY_DEVICES else _STEPS * (devices / MANY_DEVICES) ** 0.4


class TreeSearch:
    """A search, from the groups on, that can be continued.

    Args:
        steps: simulates configurations.
        request: what is planned.
        best: the best plans; those that are found are added.
        exhaustive: whether to simulate all configurations.
        can_run: see `find_plans`.
        long_steps: whether to simulate steps with any number of actions.
        counts: whether to find out why groups have no mesh.

    Attributes:
        best: the best plans.
        objective: what is minimized.
        refusals: configurations that were refused.
        simulated: number of simulated configurations.
        least: no configuration that was not looked at is below it; infinite where none is left.
    """

    def __init__(
        self,
        steps: Steps,
        request: Request,
        best: BestPlans,
        *,
        exhaustive: bool,
        can_run: CanRun,
        long_steps: bool,
        counts: bool = True,
    ) -> None:
        self._steps, self._costs, self._request, self.best = steps, steps.costs, request, best
        self._exhaustive, self._counts, self._long_steps = exhaustive, counts, long_steps
        self.objective, self.refusals, self.simulated, self.least = request.objective, Refusals(), 0, 0.0
        self._left, self._begun = 0.0, False
        known_bytes = None if exhaustive else steps.known_bytes
        self._space = Space(steps.costs, request, self.refusals, can_run, steps.shapes, known_bytes)
        self._patient = exhaustive or request.devices <= MANY_DEVICES
        self._orders: set[Hashable] = set()  # of shapes that were expanded
        self._open = OpenNodes(turns=not self._patient)
        self._candidates = Candidates(steps, request, self.refusals, exhaustive=exhaustive)

    def run(self, part: float, *, without: float = inf, tell: Tell | None = None) -> float:
        """Look at the nodes that look best, until none is left or the search ends.

        Args:
            part: of the steps of a search.
            without: more of them, as long as there is no plan.
            tell: called at each node, with the configurations that were simulated and the best value.

        Returns:
            The part of the steps that it took.
        """
        every = _steps(self._request.devices)
        given = inf if self._exhaustive else part * every
        self._left, without = given, without * every
        if not self._begun:
            self._begun = True
            self._groups()
        while self._open:
            if self._left <= (0 if self.best.plans else -without):
                break
            node = self._open.pop()
            if node.bound >= self.best.limit and not self._exhaustive:
                self.refusals.add(_SLOWER)
                continue
            self._left -= _WEIGHTS[node.level]
            node.expand(*node.given)
            if tell is not None:
                tell(self.simulated, self.best.best_value)
        self.least = self._open.least
        if self.least >= self.best.limit:
            self.least = inf
        self.refusals.set("not looked at: the search ended", 0 if self.least == inf else len(self._open))
        return 0.0 if self._exhaustive else (given - self._left) / every

    def _groups(self) -> None:
        for of, devices in self._space.groups():
            least = self._space.group_bound(of, devices)
            if least == inf:
                if self._counts:
                    self._meshes(of, devices)  # which says why it has none
                continue
            self._push(Node(0, self.best.score(least, 0.0, devices), self._meshes, (of, devices)))

    def _push(self, node: Node, penalty: float = 1.0) -> None:
        if node.bound < self.best.limit or self._exhaustive:
            self._open.push(node, penalty)
        else:
            self.refusals.add(_SLOWER)

    def _meshes(self, of: Configuration, devices: int) -> None:
        for mesh in self._space.meshes(of, devices):
            ways = list(self._space.ways(mesh))
            if ways:
                self._push_ways(Ways.of(ways), 0.0, 1, self._shapes, mesh, self._space.shapes.likely_factor(mesh))

    def _shapes(self, of: Configuration, ways: Ways) -> None:
        for shape in self._space.shapes.found(of):
            self._push_ways(ways, self._space.shapes.bound(shape), 2, self._choices, shape)

    def _push_ways(
        self, ways: Ways, seconds: float, level: int, expand: Callable[..., None], of: Any, penalty: float = 1.0
    ) -> None:
        """Of a step of at least `seconds`; those of ways that fit without offload come as early as if all did."""
        bound, usual = (
            self.best.score(max(seconds, least), ways.peak, ways.devices) for least in (ways.least, ways.seconds)
        )
        penalty *= ways.penalty
        penalty *= usual / bound if 0 < bound < usual < inf else 1.0
        self._push(Node(level, bound, expand, (of, ways)), penalty)

    def _choices(self, shape: Shape, ways: Ways) -> None:
        left = self._left_of(shape, ways)
        if not left:
            self._left += _REFUSED
            return
        if not self._long_steps and simulated_actions(shape.of) > _MOST_ACTIONS:
            self.refusals.add("too many actions to simulate in a search")
            return
        try:
            moments = moments_of(shape.of, merged=self._costs.merges_backwards)
            number = order_number(shape.of)
        except PipeloomError:
            self.refusals.add(SIZES)
            return
        if number is not None and not self._exhaustive:
            key = same_bound(shape), shape.of.precision, number
            if key in self._orders:
                self.refusals.add("another schedule has the same order")
                return
            self._orders.add(key)
        first: dict[object, Candidate] = {}  # by recomputation
        memory = self._memory(shape, moments)
        if not memory.uniform():
            self.refusals.add("the kinds of recomputation do not fit the stages")
            return
        offloading: dict[object, Candidate | None] = {}  # by recomputation; None: all activations fit
        for way in left:
            of = shape.of._replace(**{key: getattr(way.of, key) for key in _OF_WAY})
            choices = memory.found(of, every=self._exhaustive)
            offloaded = {}
            if self._takes_all or offloading.get(memory.uniform()[0], True) is not None:
                offloaded = memory.offloaded(of, every=self._exhaustive)
            if not choices and not any(offloaded.values()):
                self.refusals.too_large()
            for recompute, others in offloaded.items():
                if not others and not of.offload_states:
                    offloading[recompute] = None
                for choice in others:
                    found = Candidate(shape=shape, of=of, choice=choice, way=way)
                    if recompute in offloading and not self._takes_all:
                        before = offloading[recompute]
                        if before is None:
                            continue
                        if before.choice.kept >= choice.kept:  # and communicates less
                            before.instead.append(found)
                            continue
                    if not of.offload_states:  # whose transfers may take longer
                        offloading[recompute] = found
                    self._offer(found)
            smaller = memory if self._patient and not self._exhaustive else None
            for choice in choices:
                found = Candidate(shape=shape, of=of, choice=choice, way=way, memory=smaller)
                kinds, slower = found.choice.of.recompute, of.strategy.shards_gradients or of.offload_states
                before = first.get(kinds)
                if before is not None and slower and not self._takes_all:
                    before.instead.append(found)
                    continue
                if not of.offload_states or "offload_states" in self._request.fixed:
                    first.setdefault(kinds, found)
                self._offer(found)

    def _memory(self, shape: Shape, moments: Moments) -> MemoryChoices:
        """On few devices, searches look at the same shapes again and again."""
        if self._exhaustive or not self._patient:
            return MemoryChoices(self._costs, shape, moments, self._request, self._steps.known_bytes)
        known, key = self._steps.memory, MemoryChoices.key(shape, self._request)
        if key not in known:
            known[key] = MemoryChoices(self._costs, shape, moments, self._request, self._steps.known_bytes)
        return known[key]

    def _left_of(self, shape: Shape, ways: Ways) -> Sequence[Way]:
        """The data strategies with which a shape may fit, and be better than the best plans, by simple bounds."""
        if self._exhaustive:
            return ways.each
        most, kinds, known = self._request.memory_bytes, self._request.kinds, self._steps.known_bytes
        fit: Sequence[Way] = ways.each
        if most < inf:
            fit = [way for way in fit if known.of_head(self._costs, way.of, kinds, shape.of.slices) <= most]
        seconds = self._space.shapes.link_bounds(shape, [way.of for way in fit])
        faster = [
            way
            for way, least in zip(fit, seconds, strict=True)
            if self.best.score(max(least, way.least), way.peak, ways.devices) < self.best.limit
        ]
        left = [way for way in faster if self._may_fit(shape, way)] if most < inf else faster
        self.refusals.add(_SLOWER, len(fit) - len(faster))
        self.refusals.too_large(len(ways.each) - len(fit) + len(faster) - len(left))
        return left

    def _may_fit(self, shape: Shape, way: Way) -> bool:
        stages = self._steps.known_bytes.of(self._costs, shape)
        of = shape.of._replace(**{key: getattr(way.of, key) for key in _OF_WAY})
        offloads = way.offloaded < inf or "offload" in self._request.fixed
        return stages.may_fit(of, self._request.kinds, self._request.memory_bytes, offloads=offloads)

    @property
    def _takes_all(self) -> bool:
        return self._exhaustive or self._request.objective == "memory"

    def _offer(self, found: Candidate) -> None:
        bounds = self._candidates.bounds(found)
        if bounds is None:
            return
        of, least = found.choice.of, found.choice.least_bytes
        bound, likely = (self.best.score(seconds, least, of.devices) for seconds in bounds)
        mesh = of.inside, of.pipeline, of.data, of.microbatch_size
        factor = likely / bound if bound else 1.0
        if self.objective == "memory" and bound:  # as early as its shape, whose bound has states alone
            factor = found.way.peak / bound
        self._push(Node(3, bound, self._simulate, (found,), mesh), PENALTIES[of.granularity] * factor)

    def _simulate(self, candidate: Candidate) -> None:
        before = self._steps.work
        found = self._candidates.simulate(candidate)
        if isinstance(found, Simulated):
            self.simulated += 1
            if (refusal := self.best.add(found)) is not None:
                self.refusals.add(refusal)
        else:
            for each in found:
                self._offer(each)
        self._left -= (self._steps.work - before) / _ACTIONS
