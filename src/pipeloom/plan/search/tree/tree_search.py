"""Expansion of nodes: from groups to meshes, shapes and candidates, see `pipeloom.plan.search.space`. No torch here.

Where memory is short, bounds of plans that offload activations or cut sequences into slices are far too low: a search
would end among them. So they are nodes of their own. On few devices they come when no others are left, on many beside
them.

    group -> mesh -> shape without slices -> activations stay      firm bounds
                  -> shape without slices -> activations leave     loose bounds
                  -> shape with slices                             loose bounds

A mesh whose firm bound exceeds the best plan is expanded where its loose bound does not.
"""

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from math import inf

from pipeloom.errors import PipeloomError
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.memory.live_moments import Moments, moments_of
from pipeloom.plan.search.memory.memory_choice import MemoryChoices
from pipeloom.plan.search.request import MANY_DEVICES, Refusals, Request
from pipeloom.plan.search.short_steps import order_number, simulated_actions
from pipeloom.plan.search.simulated import Simulated, Steps
from pipeloom.plan.search.space.groups import CanRun
from pipeloom.plan.search.space.shapes import Shape, same_bound
from pipeloom.plan.search.space.space import Space
from pipeloom.plan.search.space.ways import PENALTIES, Way, Ways
from pipeloom.plan.search.tree.best_plans import BestPlans
from pipeloom.plan.search.tree.candidates import SIZES, Candidate, Candidates
from pipeloom.plan.search.tree.open_nodes import COMPLETE, Node, OpenNodes
from pipeloom.plan.search.tree.shape_candidates import ShapeCandidates, with_way

Tell = Callable[[int, float], None]
_WEIGHTS = (0.02, 0.5, 0.7, 0.5)  # of steps, by level, in proportion to their time
_REFUSED = 0.65  # of them, which shapes do not take where a look at their data strategies refuses them
_PARTIAL = 8.0  # steps without a simulated candidate on few devices, behind which the best one is simulated
_MOST_ACTIONS = 60_000  # of a simulated step on many devices
_ACTIONS = 300  # of a simulated step, that count as one of the search
_STEPS = 95  # on `MANY_DEVICES` devices
_MOST_STEPS = 4_000.0  # on at most as many; models with experts and long sequences would take many times more
SLOWER = "slower than the best plans by a lower bound"


class _Look(Enum):
    """Which plans of a shape are looked at."""

    ALL = "all"
    FIRM = "firm"
    LOOSE = "loose"


def _steps(devices: int) -> float:
    """After which a search ends."""
    return _MOST_STEPS if devices <= MANY_DEVICES else _STEPS * (devices / MANY_DEVICES) ** 0.2


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
        first: whether no search with these refusals counts those of groups, which parts of the space share.
        refusals: of other searches, to which those of this one are added.

    Attributes:
        best: the best plans.
        objective: what is minimized.
        refusals: configurations that were refused.
        simulated: number of simulated configurations.
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
        first: bool = True,
        refusals: Refusals | None = None,
    ) -> None:
        self._steps, self._costs, self._request, self.best = steps, steps.costs, request, best
        self._exhaustive, self._counts, self._first, self._long_steps = exhaustive, counts, first, long_steps
        self.objective, self.refusals, self.simulated = request.objective, refusals or Refusals(), 0
        self._left, self._simulates_at, self._begun = 0.0, 0.0, False
        known_bytes = None if exhaustive else steps.known_bytes
        self._space = Space(steps.costs, request, self.refusals, can_run, steps.shapes, known_bytes)
        self._patient = exhaustive or not request.of_many
        self._orders: set[Hashable] = set()  # of shapes that were expanded
        self._offloads = request.offloads_activations and self._costs.can_offload
        self._slices = "slices" not in request.fixed and request.allows("slices", 2)
        self._apart = not self._takes_all and (self._offloads or self._slices)
        self._firm, self._loose = (OpenNodes(turns=not self._patient) for _ in range(2))
        self._candidates = Candidates(steps, request, self.refusals, exhaustive=exhaustive)

    def run(self, part: float, *, loose: bool = True, without: float = inf, tell: Tell | None = None) -> float:
        """Look at the nodes that look best, until none is left or the search ends.

        Args:
            part: of the steps of a search.
            loose: whether to look at nodes that have loose bounds: on few devices where no others are left, on many
                beside them.
            without: more of them, as long as there is no plan.
            tell: called at each node, with the configurations that were simulated and the best value.

        Returns:
            The part of the steps that it took.
        """
        every = _steps(self._request.devices)
        given = inf if self._exhaustive else part * every
        self._left, without = given, without * every
        self._simulates_at = self._left - _PARTIAL
        if not self._begun:
            self._begun = True
            self._groups()
        while nodes := self._nodes(loose=loose):
            if self._left <= (0 if self.best.plans else -without):
                break
            node = nodes.pop(complete=self._patient and self._left < self._simulates_at)
            if node.bound >= self.best.limit and not self._exhaustive:
                self._push(node)
                continue
            self._left -= _WEIGHTS[node.level]
            node.expand(*node.given)
            if node.level == COMPLETE:
                self._simulates_at = self._left - _PARTIAL
            if tell is not None:
                tell(self.simulated, self.best.best_value)
        return 0.0 if self._exhaustive else (given - self._left) / every

    def _nodes(self, *, loose: bool) -> OpenNodes | None:
        """The open nodes whose best one is next; None: none is left."""
        firm_first = self._patient or not loose or self._firm.key <= self._loose.key
        if self._firm and firm_first:
            return self._firm
        return self._loose if loose and self._loose else None

    @property
    def least(self) -> float:
        """No configuration that was not looked at is below it; infinite where none is left that may be better."""
        return self.least_of(loose=True)

    def least_of(self, *, loose: bool) -> float:
        """`least`, of those with loose bounds too, or without them."""
        least = 0.0
        if self._begun:
            least = min(self._firm.least(loose=loose), self._loose.least(loose=True) if loose else inf)
        return least if least < self.best.limit else inf

    @property
    def has_best(self) -> bool:
        """Whether the best plan is one of this search."""
        of = self.best.plans[0].of if self.best.plans else None
        fixed = self._request.fixed
        return (
            of is not None
            and of.pipeline == fixed.get("pipeline", of.pipeline)
            and of.inside.expert == fixed.get("expert", of.inside.expert)
        )

    @property
    def open(self) -> int:
        """The number of nodes that are left."""
        return len(self._firm) + len(self._loose)

    def _groups(self) -> None:
        for of, devices in self._space.groups.found(counts=self._first):
            least = self._space.group_bound(of, devices)
            if least == inf:
                if self._counts:
                    self._meshes(of, devices)  # which says why it has none
                continue
            self._push(Node(0, self.best.score(least, 0.0, devices), self._meshes, (of, devices)))

    def _push(self, node: Node, penalty: float = 1.0, *, loose: bool = False) -> None:
        """Open a node: among those with loose bounds, if it has no others."""
        if self._exhaustive or node.bound < self.best.limit:
            (self._loose if loose else self._firm).push(node, penalty)
        elif node.loose < self.best.limit:
            self._loose.push(node._replace(bound=node.loose), penalty)
        else:
            self.refusals.add(SLOWER)

    def _meshes(self, of: Configuration, devices: int) -> None:
        for mesh in self._space.meshes(of, devices):
            ways = list(self._space.ways(mesh))
            if ways:
                self._push_mesh(mesh, Ways.of(ways))

    def _push_mesh(self, mesh: Configuration, ways: Ways) -> None:
        firm, least = (self.best.score(each, ways.peak, ways.devices) for each in (ways.seconds, ways.least))
        penalty = ways.penalty * self._space.shapes.likely_factor(mesh)
        if self._apart:
            self._push(Node(1, firm, self._shapes, (mesh, ways), loose=least), penalty)
        else:
            self._push(Node(1, least, self._shapes, (mesh, ways)), penalty * _later(firm, least))

    def _shapes(self, of: Configuration, ways: Ways) -> None:
        looks = (_Look.FIRM, _Look.LOOSE) if self._offloads else (_Look.FIRM,)
        for shape in self._space.shapes.found(of):
            bound = self._space.shapes.bound(shape)
            firm = self.best.score(max(bound, ways.seconds), ways.peak, ways.devices)
            least = self.best.score(max(bound, ways.least), ways.peak, ways.devices)
            together = not self._apart or (self._slices and shape.of.slices > 1)
            for look in (_Look.ALL,) if together else looks:
                given = shape, ways, look
                if look is not _Look.FIRM:
                    penalty = ways.penalty * _later(firm, least)
                    self._push(Node(2, least, self._choices, given), penalty, loose=self._apart)
                elif firm < inf:
                    self._push(Node(2, firm, self._choices, given), ways.penalty)

    def _choices(self, shape: Shape, ways: Ways, look: _Look) -> None:
        left = self._left_of(shape, ways, look)
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
            key = same_bound(shape), shape.of.precision, number, look is _Look.LOOSE
            if key in self._orders:
                self.refusals.add("another schedule has the same order")
                return
            self._orders.add(key)
        memory = self._memory(shape, moments)
        if not memory.uniform():
            self.refusals.add("the kinds of recomputation do not fit the stages")
            return
        found = ShapeCandidates(shape, memory, self._request, exhaustive=self._exhaustive, again=self._patient)
        candidates = found.offloaded(left) if look is not _Look.FIRM else []
        if look is not _Look.LOOSE:
            candidates += found.kept(left)
        else:
            found.fit |= {way for way in left if memory.found(with_way(shape.of, way))}
        for each in candidates:
            self._offer(each)
        if self._counts_in(look):
            self.refusals.too_large(len(left) - len(found.fit))

    def _counts_in(self, look: _Look) -> bool:
        """Whether ways that are refused count: where offload follows, they do not fit without it."""
        return look is not _Look.FIRM or not self._offloads

    def _memory(self, shape: Shape, moments: Moments) -> MemoryChoices:
        """On few devices, searches look at the same shapes again and again."""
        if self._exhaustive or not self._patient:
            return MemoryChoices(self._costs, shape, moments, self._request, self._steps.known_bytes)
        known, key = self._steps.memory, MemoryChoices.key(shape, self._request)
        if key not in known:
            known[key] = MemoryChoices(self._costs, shape, moments, self._request, self._steps.known_bytes)
        return known[key]

    def _left_of(self, shape: Shape, ways: Ways, look: _Look) -> Sequence[Way]:
        """The data strategies with which a shape may fit, and be better than the best plans, by simple bounds."""
        if self._exhaustive:
            return ways.each
        most, kinds, known = self._request.memory_bytes, self._request.kinds, self._steps.known_bytes
        left, firm = ways.each, look is _Look.FIRM
        if most < inf:
            states = known.most_states(self._costs, shape.of, kinds, shape.of.slices, most)
            left = [way for way in left if way.states <= states]
        stages = known.of(self._costs, shape) if most < inf and left else None
        if stages is not None:
            states = stages.most_states(shape.of, kinds, most)
            left = [way for way in left if way.states <= states]
        seconds = self._space.shapes.link_bounds(shape, [way.of for way in left])
        faster = [
            way
            for way, least in zip(left, seconds, strict=True)
            if self.best.score(max(least, way.seconds if firm else way.least), way.peak, ways.devices) < self.best.limit
        ]
        slower = len(left) - len(faster)
        if stages is not None:
            offload, fit = "offload" in self._request.fixed, list[Way]()
            for way in faster:
                offloads = offload or (way.offloaded < inf and not firm)
                if stages.may_fit(with_way(shape.of, way), kinds, most, offloads=offloads):
                    fit.append(way)
            faster = fit
        if self._counts_in(look):
            self.refusals.add(SLOWER, slower)
            self.refusals.too_large(len(ways.each) - slower - len(faster))
        return faster

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
        apart = self._apart and (of.offload is not None or (self._slices and of.slices > 1))
        self._push(Node(3, bound, self._simulate, (found,), mesh), PENALTIES[of.granularity] * factor, loose=apart)

    def _simulate(self, candidate: Candidate) -> None:
        before = self._steps.work
        others = self._candidates.simulate(candidate)
        if isinstance(others, Simulated):
            self.simulated += 1
            if (refusal := self.best.add(others)) is not None:
                self.refusals.add(refusal)
            others = self._candidates.keeping_more(candidate, others)
        for each in others:
            self._offer(each)
        self._left -= (self._steps.work - before) / _ACTIONS


def _later(firm: float, least: float) -> float:
    """The penalty with which ways that fit without offload come as early as if all did, by their bounds."""
    return firm / least if 0 < least < firm < inf else 1.0
