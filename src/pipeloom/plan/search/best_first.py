"""Branch and bound over the space of configurations. No torch here.

Every node has a lower bound; nodes whose bound exceeds the best simulated values, less a tolerance, are discarded. The
node that looks best is expanded next: bounds of partial configurations are less tight, so they count a little more
(weighted A*, Pohl 1970), and complete ones are simulated early. A search on many devices ends after a number of steps.
What is left then has a bound too, which says by how much another plan could be faster at most.
"""

import gc
import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from math import ceil, inf, prod
from typing import Any

from pipeloom.common.quantities import bytes_text
from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir.data_axis import Granularity
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.live_moments import Moments, moments_of
from pipeloom.plan.search.memory_choice import Choice, MemoryChoices
from pipeloom.plan.search.offload_bound import lowest_cap, offloaded_of
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.shapes import MANY_DEVICES, Shape, candidate_seconds
from pipeloom.plan.search.simulated import Simulated, Step
from pipeloom.plan.search.space import CanRun, Space, Way

_COLLECTED = 1_000_000  # objects between two looks for cycles
_TOLERANCE = 0.005
_FACTORS = (1.25, 1.22, 1.08, 1.0)  # of bounds, by level
_WEIGHTS = (0.2, 1.0, 0.5, 3.0)  # of steps, by level
_PENALTIES = {Granularity.STEP: 1.0, Granularity.CHUNK: 1.1, Granularity.MICROBATCH: 1.2}  # they hide less
_MORE = 1.5  # room than what was missing
_RESERVE, _MUCH_MORE, _FEW_TRIES = 0.03, 3.0, 2  # the same on many devices
_FAR = 1.25  # from the bound of what is left: a search goes on
_MOST_ACTIONS = 60_000  # of a simulated step on more devices
_ACTIONS = 400  # of a simulated step, that count as one of the search
_STEPS = 200  # on `MANY_DEVICES` devices
_MOST_TRIES = 4  # of more recomputation, where a simulated rank needs more memory than its closed form
_SLOWER = "slower than the best plans by a lower bound"
_SIZES = "the schedule does not support the sizes"


@dataclass(kw_only=True)
class Answer:
    """What a search found.

    Attributes:
        plans: best first.
        refused: configurations by reason.
        considered: configurations that were refused, discarded by their bound, or simulated.
        simulated: number of simulated ones.
        least: no configuration that was not looked at is below it; infinite where none is left.
        seconds: of the search.
    """

    plans: list[Simulated] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    considered: int = 0
    simulated: int = 0
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
        part: of the steps after which a search on many devices ends.

    Raises:
        InputError: there is none.
    """
    with _rare_collections():
        return _find_plans(costs, request, exhaustive, can_run, accept, known, part)


@contextmanager
def _rare_collections() -> Iterator[None]:
    """A search makes millions of objects, few of them in cycles: looking for these would take a quarter of its time."""
    usual = gc.get_threshold()
    gc.set_threshold(_COLLECTED, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _find_plans(
    costs: StepCosts,
    request: Request,
    exhaustive: bool,
    can_run: CanRun,
    accept: Callable[[Simulated], str | None],
    known: Sequence[Simulated],
    part: float,
) -> Answer:
    begin = time.perf_counter()
    coarse = request.devices > MANY_DEVICES and "data_granularity" not in request.fixed and not exhaustive
    first = replace(request, fixed={**request.fixed, "data_granularity": Granularity.STEP}) if coarse else request
    search = _Search(costs, first, exhaustive, can_run, accept, known, part)
    search.run()
    found = search.answer
    far = not found.plans or found.plans[0].step_seconds > _FAR * found.least
    if coarse and far and request.objective != "memory":  # finer granularities need less memory, and hide less
        search = _Search(costs, request, exhaustive, can_run, accept, found.plans, part)
        search.run()
        search.answer.simulated += found.simulated
    answer = search.answer
    answer.refused = dict(search.refusals.reasons.most_common())
    answer.considered = search.refusals.considered + answer.simulated
    answer.seconds = time.perf_counter() - begin
    if not answer.plans:
        raise InputError(_none(request, search.refusals))
    return answer


def _none(request: Request, refusals: Refusals) -> str:
    """Why there is no plan."""
    asked = f"--devices={request.devices} --batch.size={request.batch_size}"
    if refusals.least_bytes < inf:
        missing = refusals.least_bytes - request.memory_bytes
        return (
            f"{asked}: no plan fits into {bytes_text(request.memory_bytes)} per device; the smallest one found needs "
            f"{bytes_text(missing)} more. Use more devices, or devices with more memory."
        )
    reasons = "; ".join(f"{reason} ({number})" for reason, number in refusals.reasons.most_common(3))
    why = _undivided(request) or reasons or "the values of --fix exclude each other"
    return f"{asked}: no plan can run: {why}. Change devices, batch or --fix."


def _undivided(request: Request) -> str | None:
    """What the values of ``--fix`` do not divide."""
    for whole, size, names in (
        ("devices", request.devices, ("pipeline", "data", "tensor", "context")),
        ("samples", request.batch_size, ("data", "microbatches", "microbatch_size")),
    ):
        given = {name: request.fixed[name] for name in names if name in request.fixed}
        if size % prod(given.values()):
            return f"{size} {whole} cannot be divided by {' x '.join(f'{name}={n}' for name, n in given.items())}"
    return None


def _steps(devices: int) -> float:
    """After which a search ends."""
    return inf if devices <= MANY_DEVICES else _STEPS * (devices / MANY_DEVICES) ** 0.25


def _kind(of: Configuration) -> tuple[object, ...]:
    """What plans that are shown side by side differ in."""
    sizes = of.inside, of.pipeline, of.data, of.chunks, of.slices, of.microbatch_size
    return *sizes, of.schedule, of.precision.dtype


class _Search:
    """The heap and the best so far."""

    def __init__(
        self,
        costs: StepCosts,
        request: Request,
        exhaustive: bool,
        can_run: CanRun,
        accept: Callable[[Simulated], str | None],
        plans: Sequence[Simulated],
        part: float,
    ) -> None:
        self.costs, self.request, self.exhaustive, self.accept = costs, request, exhaustive, accept
        self.refusals, self.answer = Refusals(), Answer(plans=list(plans))
        self.space = Space(costs, request, self.refusals, can_run)
        self._heap: list[tuple[float, int, float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._left = inf if exhaustive else part * _steps(request.devices)
        self._number = count()
        self._done: set[Choice] = set()

    def run(self) -> None:
        for of, devices in self.space.groups():
            self._push(self._score(self.space.group_bound(of, devices), 0.0, devices), 0, self._meshes, of, devices)
        while self._heap:
            _, level, bound, _, expand, node = heapq.heappop(self._heap)
            if bound >= self._most() and not self.exhaustive:
                self.refusals.add(_SLOWER)
                continue
            if self._left <= 0 and self.answer.plans:
                self.answer.least = min(bound, *(each[2] for each in self._heap), inf)
                self.refusals.add("not looked at: the search ended", len(self._heap) + 1)
                break
            self._left -= _WEIGHTS[-level]
            expand(*node)

    def _score(self, seconds: float, peak: float, devices: int) -> float:
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
        return self._value(plans[top - 1]) * (1 - _TOLERANCE) if len(plans) >= top else inf

    def _value(self, plan: Simulated) -> float:
        return self._score(plan.step_seconds, plan.peak, plan.of.devices)

    def _push(self, bound: float, level: int, expand: Callable[..., Any], *node: Any, penalty: float = 1.0) -> None:
        if bound < self._most() or self.exhaustive:
            key = bound * _FACTORS[level] * penalty
            heapq.heappush(self._heap, (key, -level, bound, next(self._number), expand, node))
        else:
            self.refusals.add(_SLOWER)

    def _meshes(self, of: Configuration, devices: int) -> None:
        for mesh in self.space.meshes(of, devices):
            ways = list(self.space.ways(mesh))
            if ways:
                self._push_ways(ways, 0.0, 1, self._shapes, mesh, ways)

    def _push_ways(
        self, ways: Sequence[Way], seconds: float, level: int, expand: Callable[..., Any], *node: Any
    ) -> None:
        """Of a step of at least `seconds`; those of ways that fit without offload come as early as if all did."""
        devices = ways[0].of.devices
        bound = min(self._score(max(seconds, way.least), way.peak, devices) for way in ways)
        usual = min(self._score(max(seconds, way.seconds), way.peak, devices) for way in ways)
        penalty = min(_PENALTIES[way.of.granularity] for way in ways)
        self._push(bound, level, expand, *node, penalty=penalty * (usual / bound if bound < usual < inf else 1.0))

    def _shapes(self, of: Configuration, ways: Sequence[Way]) -> None:
        for shape in self.space.shapes.found(of):
            self._push_ways(ways, self.space.shapes.bound(shape), 2, self._choices, shape, ways)

    def _choices(self, shape: Shape, ways: Sequence[Way]) -> None:
        try:
            moments = moments_of(shape.of)
        except PipeloomError:
            self.refusals.add(_SIZES)
            return
        first: dict[object, Candidate] = {}  # by recomputation
        memory = MemoryChoices(self.costs, shape, moments, self.request)
        kept: dict[object, float] = {}  # by recomputation, the most activations that stay on a rank
        for way in ways:
            of = replace(
                shape.of,
                strategy=way.of.strategy,
                granularity=way.of.granularity,
                offload_states=way.of.offload_states,
            )
            choices, least = memory.found(of, self._reserve(moments), every=self.exhaustive)
            offloaded = {}
            if self._takes_all or inf not in [kept.get(each) for each in memory.uniform()[:1]]:
                offloaded = memory.offloaded(of, self._reserve(moments), every=self.exhaustive)
            if not choices and not any(offloaded.values()):
                self.refusals.too_large(min(least, memory.least_offloaded(of)))
            for recompute, others in offloaded.items():
                # An earlier data strategy that keeps as many communicates less.
                if self._takes_all or not others or others[0].kept > kept.get(recompute, -1):
                    if not of.offload_states:  # whose transfers may take longer
                        kept[recompute] = others[0].kept if others else inf
                    for choice in others:
                        self._offer(Candidate(shape=shape, of=of, choice=choice, memory=memory, way=way))
            for choice in choices:
                found = Candidate(shape=shape, of=of, choice=choice, memory=memory, way=way)
                before, slower = first.get(choice.of.recompute), of.strategy.shards_gradients or of.offload_states
                if before is not None and slower and not self._takes_all:
                    before.instead.append(found)
                    continue
                if not of.offload_states or "offload_states" in self.request.fixed:
                    first.setdefault(choice.of.recompute, found)
                self._offer(found)

    def _reserve(self, moments: Moments) -> list[float] | None:
        """Bytes of each rank that stay free at first, where there is no time for many attempts."""
        most = self.request.memory_bytes
        return None if self._left == inf or most == inf else [_RESERVE * most] * len(moments)

    @property
    def _takes_all(self) -> bool:
        return self.exhaustive or self.request.objective == "memory"

    def _offer(self, found: "Candidate") -> None:
        of = found.choice.of
        update = self.costs.update_seconds(of, found.shape.placement.stages_of)
        least, likely = candidate_seconds(self.costs, found.shape._replace(of=of))
        if of.offload is not None or of.offload_states:
            offloaded = offloaded_of(self.costs, of, found.shape.placement.stages_of)
            if offloaded.host_bytes > self.costs.cluster.host_bytes_per_device:
                self.refusals.add("what is offloaded needs more memory than the host has")
                return
            least = max(least, offloaded.seconds)
            likely = max(least, likely)
        bound = self._bound(found, least + update)
        penalty = _PENALTIES[of.granularity] * self._bound(found, likely + update) / bound
        self._push(bound, 3, self._simulate, found, penalty=penalty)

    def _bound(self, found: "Candidate", seconds: float) -> float:
        least = found.way.seconds if found.choice.of.offload is None else found.way.offloaded
        return self._score(max(least, seconds), found.choice.least_bytes, found.of.devices)

    def _simulate(self, candidate: "Candidate") -> None:
        choice = candidate.choice
        if choice in self._done:
            return
        self._done.add(choice)
        try:
            step = Step(self.costs, choice.of, choice.schedule_limit)
            if step.actions > _MOST_ACTIONS and self._left < inf and "schedule" not in self.request.fixed:
                self.refusals.add("too many actions to simulate in a search")
                return
            self._left -= step.actions / _ACTIONS
            peaks = step.peaks()
        except PipeloomError:
            kept, least = choice.of.offload or inf, lowest_cap(choice.of)
            few = f"offload={kept} keeps fewer activations than a rank needs at once ({least})"
            self.refusals.add(few if kept < least else _SIZES)
            return
        if max(peaks) > self.request.memory_bytes:
            self._again(candidate, peaks)
            return
        for _ in candidate.instead:
            self.refusals.add("an earlier data strategy that fits communicates less")
        found = step.simulated(peaks)
        self.answer.simulated += 1
        if self._value(found) >= self._most() / (1 - _TOLERANCE):
            return
        refusal = self.accept(found)
        if refusal is not None:
            self.refusals.add(refusal)
            return
        plans = {_kind(plan.of): plan for plan in sorted([*self.answer.plans, found], key=self._value, reverse=True)}
        self.answer.plans = sorted(plans.values(), key=self._value)[: self.request.top]

    def _again(self, candidate: "Candidate", peaks: Sequence[float]) -> None:
        """Recompute more on ranks that need more memory than their closed form, or shard more."""
        self.refusals.too_large(max(peaks))
        if candidate.instead:
            first, *others = candidate.instead
            self._offer(replace(first, instead=others))
        if candidate.choice.of.offload is not None:
            self._keep_fewer(candidate, max(peaks) - self.request.memory_bytes)
            return
        if candidate.tries == (_MOST_TRIES if self._left == inf else _FEW_TRIES) or "recompute" in self.request.fixed:
            return
        most = self.request.memory_bytes
        before = candidate.beside or [0.0] * len(peaks)
        closed = candidate.memory.closed_bytes(candidate.of, candidate.choice.of)
        factor = _MORE if self._left == inf else _MUCH_MORE
        more = [
            max(size + factor * (peak - most), peak - known) if peak > most else size
            for size, peak, known in zip(before, peaks, closed, strict=True)
        ]
        offloaded = candidate.memory.offloaded(candidate.of, more, every=self.exhaustive)
        for choice in chain.from_iterable(offloaded.values()):
            if choice.of.recompute == candidate.choice.of.recompute:
                self._offer(replace(candidate, choice=choice, instead=[]))
        choices, _ = candidate.memory.found(candidate.of, more)
        if choices:
            self._offer(replace(candidate, choice=choices[0], instead=[], beside=more, tries=candidate.tries + 1))

    def _keep_fewer(self, candidate: "Candidate", missing: float) -> None:
        """Offload more, where a rank has too little memory by `missing` bytes."""
        of = candidate.choice.of
        if self.exhaustive or "offload" in self.request.fixed or not of.offload or candidate.tries == _FEW_TRIES:
            return
        kept = max(self.costs.kept_bytes(of)) / of.slices
        number = of.offload - max(1, ceil(missing / kept))
        if number >= lowest_cap(of):
            choice = replace(candidate.choice, of=replace(of, offload=number))
            self._offer(replace(candidate, choice=choice, tries=candidate.tries + 1))


@dataclass(kw_only=True)
class Candidate:
    """A configuration of which nothing is open.

    Attributes:
        shape: without data strategy and recomputation.
        of: with the data strategy.
        choice: with both.
        memory: what the shape can recompute.
        way: the data strategy, with bounds of a step.
        instead: those that shard more, and are no faster.
        beside: bytes of each rank that closed forms do not have, found by an attempt to run it with less recomputation.
        tries: attempts so far.
    """

    shape: Shape
    of: Configuration
    choice: Choice
    memory: MemoryChoices
    way: Way
    instead: list["Candidate"] = field(default_factory=list)
    beside: Sequence[float] | None = None
    tries: int = 0
