"""Schedules, virtual stages, slices, orders of mesh axes, and blocks per stage of a mesh. No torch here."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import permutations, product
from math import inf
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.ir import Placement
from pipeloom.ir.data_axis import DataStrategy
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.configuration import Configuration, even_blocks
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_bound import busy_links, message_seconds, pipeline_bound
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.balance import balanced_blocks
from pipeloom.plan.search.space.bounds import Recomputed, schedule_seconds
from pipeloom.plan.search.space.data_runs import runs_seconds
from pipeloom.plan.search.space.link_bound import link_bound
from pipeloom.plan.stage_times import Seconds
from pipeloom.schedules import Family

LEAST_TOKENS = 256  # of a process or slice
ON_REQUEST = ("naive", "search", "zb-auto")  # considered where they are asked for: never faster, and slow to find
_ASKED_OF_MANY = (*ON_REQUEST, "hanayo")  # on many devices: its waves take longest to build and to simulate
_WITHOUT_PIPELINE = ("1f1b", "interleaved")  # with one stage, and with several
_FEW = (1, 2, 4)  # stages without a pipeline
MOST_CHUNKS = 16
MOST_SLICES = 16
_SLICES = (1, 2, 4, 8, MOST_SLICES)
_SMALL = 16  # ranks of a schedule that shows the shape of larger ones


class Shape(NamedTuple):
    """A configuration with a schedule, and what follows from it."""

    of: Configuration
    placement: Placement
    split: bool


@dataclass
class KnownShapes:
    """What searches with the same costs share.

    Attributes:
        groups: of requests, and why there are no others.
        sizes: elements of the parameters of one pipeline on one process of each stage.
        work: seconds of one micro-batch of groups, at least: of its computations, and of a way through a block.
        single: seconds of single blocks, and of the shortest way through one and back.
        recomputed: work and held activations of meshes.
        orders: of the axes of meshes.
        blocks: per stage.
        bounds: of shapes.
    """

    groups: dict[Hashable, Sequence[tuple[Configuration, int] | str]] = field(default_factory=dict)
    sizes: dict[InsideStage, float] = field(default_factory=dict)
    work: dict[tuple[Configuration, int], tuple[float, float]] = field(default_factory=dict)
    single: dict[Hashable, tuple[list[Seconds], float]] = field(default_factory=dict)
    recomputed: dict[Hashable, Recomputed] = field(default_factory=dict)
    orders: dict[Hashable, list[tuple[str, ...]]] = field(default_factory=dict)
    blocks: dict[Hashable, list[tuple[int, ...]]] = field(default_factory=dict)
    bounds: dict[Hashable, float] = field(default_factory=dict)


class Shapes:
    """All shapes of meshes.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        refusals: where refused configurations are counted.
        known: what was computed for other requests with these costs.
    """

    def __init__(
        self, costs: StepCosts, request: Request, refusals: Refusals, known: KnownShapes | None = None
    ) -> None:
        self._costs, self._least = costs.uncorrected
        self._request, self._refusals = request, refusals
        self._layers = costs.num_blocks
        self._most_stages = self._layers + 2 * request.ends_alone
        self._known = known or KnownShapes()

    def block_seconds(self, of: Configuration) -> list[Seconds]:
        """Seconds of single blocks; the first has the embedding and the last the head."""
        return self._of_single(of)[0]

    def least_way(self, of: Configuration) -> float:
        """Seconds of one micro-batch through the shortest block and back."""
        return self._of_single(of)[1]

    def _of_single(self, of: Configuration) -> tuple[list[Seconds], float]:
        key = self._costs.same_seconds(of)
        found = self._known.single.get(key)
        if found is None:
            blocks = self._costs.stage_seconds(single_blocks(of, self._layers)._replace(recompute=Recompute.NONE))
            found = self._known.single[key] = blocks, min(each.forward + each.backward_input for each in blocks)
        return found

    def found(self, of: Configuration) -> Iterator[Shape]:
        """The shapes of a mesh."""
        fixed = self._request.fixed
        orders = [fixed["order"]] if "order" in fixed else self.orders(of)
        asked = _ASKED_OF_MANY if self._request.of_many else ON_REQUEST
        stages: dict[Hashable, list[tuple[tuple[str, ...], tuple[int, ...]]]] = {}  # orders and blocks of placements
        for name, family in schedules.SYNCHRONOUS.items():
            if not self._request.allows("schedule", name) or (name in asked and "schedule" not in fixed):
                continue
            sliced = family.sliced and fixed.get("slices", 1) > 1
            if of.pipeline == 1 and not sliced and name not in (fixed.get("schedule"), *_WITHOUT_PIPELINE):
                continue  # the same as one of these
            for chunks, slices in product(self._chunks(family, of.pipeline), self._slices(family, of)):
                try:
                    placement, split = shape_of(name, of.pipeline, chunks, slices)
                except ScheduleError:
                    self._refusals.add("the schedule does not support the sizes")
                    continue
                if placement.num_stages > self._most_stages:
                    self._refusals.add("more stages than blocks")
                    continue
                if not stages.get((slices, placement)):
                    stages[slices, placement] = [
                        (order, blocks) for order in orders for blocks in self._blocks(of, slices, order, placement)
                    ]
                for order, blocks in stages[slices, placement]:
                    each = of._replace(schedule=name, chunks=chunks, slices=slices, order=order, blocks=blocks)
                    yield Shape(each, placement, split)

    def _chunks(self, family: Family, pipeline: int) -> list[int]:
        """Virtual stages per rank; where any number is supported, one is another schedule's."""
        if family.chunks is not None:
            numbers = [family.chunks]
        elif "chunks" in self._request.fixed:
            numbers = [self._request.fixed["chunks"]]
        else:
            least = 1 if "schedule" in self._request.fixed else 2
            numbers = list(range(least, MOST_CHUNKS + 1))
        most = max(1, self._most_stages // pipeline)
        if family.chunks is None and "chunks" in self._request.fixed and numbers[0] > most:
            self._refusals.add("more stages than blocks")
        fit = [n for n in numbers if self._request.allows("chunks", n) and (n <= most or family.chunks is not None)]
        wholes = {self._layers, self._most_stages}
        if pipeline == 1:  # with more stages, each recomputes as much as it needs, but they communicate more often
            most_even = {max((n for n in fit if whole % n == 0), default=0) for whole in wholes}
            return [n for n in fit if n in {*_FEW, *most_even, fit[-1]}]
        if not self._request.of_many:
            return fit
        even = [n for n in fit if any(blocks % (n * pipeline) == 0 for blocks in wholes)]
        return even or fit

    def _slices(self, family: Family, of: Configuration) -> list[int]:
        fixed = self._request.fixed.get("slices")
        numbers = _SLICES if fixed is None else (fixed,)
        return [
            n
            for n in numbers
            if (n > 1 if family.sliced and "schedule" not in self._request.fixed else n == 1 or family.sliced)
            and self._request.allows("slices", n)
            and self._can_slice(of, n, fixed)
        ]

    def _can_slice(self, of: Configuration, slices: int, fixed: int | None) -> bool:
        parts = of.inside.tensor if of.inside.sequence else 1
        tokens = self._costs.tokens
        return slices == 1 or (
            of.inside.context == 1
            and tokens % (slices * parts) == 0
            and (fixed is not None or tokens // slices >= LEAST_TOKENS)
        )

    def _blocks(
        self, of: Configuration, slices: int, order: tuple[str, ...], placement: Placement
    ) -> list[tuple[int, ...]]:
        """Even ones, and those with the least work of the rank that has most."""
        given = self._request.fixed.get("blocks")
        if given is not None:
            fits = len(given) == placement.num_stages and sum(given) == self._layers
            if not fits or (0 in given and not self._request.ends_alone):
                self._refusals.add("the blocks do not fit the stages")
                return []
            return [given]
        alone = self._request.ends_alone
        each = of._replace(slices=slices, order=order)
        key = self._costs.same_seconds(each), placement, alone
        found = self._known.blocks.get(key)
        if found is None:
            found = self._known.blocks[key] = self._balanced(each, placement, alone)
        return found

    def _balanced(self, of: Configuration, placement: Placement, ends_alone: bool) -> list[tuple[int, ...]]:
        even = tuple(even_blocks(self._layers, placement.num_stages))
        if placement.num_ranks == 1:
            return [even]
        if not ends_alone:
            seconds = [sum(each) for each in self.block_seconds(of)]
            return list(dict.fromkeys((even, balanced_blocks(seconds, placement))))
        apart = of._replace(chunks=1, blocks=(0, *[1] * self._layers, 0), recompute=Recompute.NONE)
        seconds = [sum(each) for each in self._costs.stage_seconds(apart)]
        first, *inner, last = balanced_blocks(seconds, placement)  # of embedding, blocks, and head
        return list(dict.fromkeys((even, (first - 1, *inner, last - 1))))

    def orders(self, of: Configuration) -> list[tuple[str, ...]]:
        """Orders of the axes of which none has links at least as fast as another's for everything."""
        known = self._known.orders
        if of not in known:
            known[of] = self._orders(of)
        return known[of]

    def _orders(self, of: Configuration) -> list[tuple[str, ...]]:
        degrees = {"dp": of.data, "pp": of.pipeline, "cp": of.inside.context}
        axes = [axis for axis, degree in degrees.items() if degree > 1]
        found: dict[tuple[str, ...], tuple[float, ...]] = {}
        for chosen in permutations(axes):
            order = (*(axis for axis in ORDER if axis not in (*chosen, "tp")), *chosen, "tp")
            found[order] = self._link_seconds(of._replace(order=order))
        unique = {costs: order for order, costs in reversed(found.items())}
        return [
            order
            for costs, order in unique.items()
            if not any(other != costs and all(map(float.__le__, other, costs)) for other in unique)
        ]

    def _link_seconds(self, of: Configuration) -> tuple[float, ...]:
        """Seconds of messages between stages, of data-parallel sums, and of work, whose collectives use links too."""
        network = self._costs.network(of)
        rate = network.data_sum_bytes_per_second or network.data_bytes_per_second or inf
        latency, slowest = network.slowest
        near = 1 / (network.bytes_per_second or inf)
        far = [1 / link.bytes_per_second for link in network.links for _ in link.ranks]
        work = sum(map(sum, self._costs.stage_seconds(of)))
        sums = 1 / rate if of.replicas > 1 else 0.0
        return (1 / slowest, near + sum(far), latency, sums, work)

    def likely_factor(self, of: Configuration) -> float:
        """What steps of a mesh take over the bound of the mesh, without memory: it knows a third of their bubble.

        The bubble is that of as many virtual stages as there can be; where blocks are uneven, the busiest rank counts.
        """
        chunks = max(1, min(MOST_CHUNKS, self._most_stages // of.pipeline))
        bubble = (of.pipeline - 1) / (of.microbatches * chunks)
        uneven = min(-(-n // of.pipeline) * of.pipeline / n for n in {self._layers, self._most_stages})
        return uneven * (1 + bubble) / (1 + bubble / 3)

    def bound(self, shape: Shape) -> float:
        """`pipeline_seconds` without recomputation, and sums of gradients between ranks that hold the same stage."""
        key, bounds = same_bound(shape), self._known.bounds
        if key not in bounds:
            sharded = shape.of._replace(strategy=DataStrategy.ZERO1)  # which has the smallest ones
            sums = self._costs.shared_sum_seconds(sharded, shape.placement)
            bounds[key] = self._least * (pipeline_seconds(self._costs, shape) + sums)
        return bounds[key]

    def link_bounds(self, shape: Shape, strategies: Iterable[Configuration]) -> list[float]:
        """For each data strategy, `link_seconds` of a shape with it, and the update, without recomputation."""
        same, bounds, found = same_bound(shape), self._known.bounds, list[float]()
        for of in strategies:
            key = same, of.precision, of.optimizer, of.strategy, of.offload_states
            if key not in bounds:
                each = shape.of._replace(strategy=of.strategy, offload_states=of.offload_states)
                update = self._costs.update_seconds(each, shape.placement.stages_of)
                bounds[key] = self._least * (link_seconds(self._costs, shape._replace(of=each)) + update)
            found.append(bounds[key])
        return found


def single_blocks(of: Configuration, layers: int) -> Configuration:
    """The configuration with a stage for each block."""
    return of._replace(chunks=1, blocks=(1,) * layers)


def _same_layers(of: Configuration) -> Hashable:
    """What seconds of layers of a configuration depend on, beside its schedule and the order of its mesh axes."""
    return of.inside, of.microbatch_size, of.microbatches, of.element, of.pipeline, of.data


def same_bound(shape: Shape) -> Hashable:
    """What bounds of a shape without a data strategy depend on."""
    of = shape.of
    return _same_layers(of), of.order, of.slices, of.blocks, shape[1:]


def candidate_seconds(costs: StepCosts, shape: Shape) -> tuple[float, float]:
    """Seconds of a step without update where nothing but the order of a schedule is open: at least, and likely."""
    of, stages = shape.of, costs.stage_seconds(shape.of)
    least = max(pipeline_seconds(costs, shape), link_seconds(costs, shape), runs_seconds(costs, of, shape.placement))
    return least, max(least, schedule_seconds(of.schedule, stages, shape.placement, of.microbatches, of.chunks))


def pipeline_seconds(costs: StepCosts, shape: Shape) -> float:
    """The bounds of `pipeline_bound` and `busy_links` for a shape."""
    of = shape.of
    stages, count = costs.stage_seconds(of), of.slices
    message = count * message_seconds(costs, of)  # as if slices took as long as a micro-batch
    bound = pipeline_bound(stages, shape.placement, of.microbatches * count, message, split=shape.split)
    return max(bound / count, busy_links(costs, of, shape.placement))


def link_seconds(costs: StepCosts, shape: Shape) -> float:
    """The bound of `link_bound` for a shape with a data strategy."""
    of = shape.of
    if of.replicas == 1 or of.inside.expert > 1:
        return 0.0
    stages, message = costs.stage_seconds(of), message_seconds(costs, of)
    if of.slices > 1:
        stages = [each.times(1 / of.slices) for each in stages]
    return link_bound(costs, of, shape.placement, stages, message, split=shape.split)


@lru_cache(maxsize=4096)
def shape_of(name: str, ranks: int, chunks: int, slices: int) -> tuple[Placement, bool]:
    """The placement of a schedule, and whether it splits backwards.

    Raises:
        ScheduleError: the schedule does not support these numbers.
    """
    family = schedules.find(name)
    number = None if family.chunks else chunks
    if family.to_measure:
        return Placement.loop(ranks, chunks), True
    if chunks > 2 and family.chunks is None:
        placement, split = shape_of(name, ranks, 2, slices)
        if placement == Placement.loop(ranks, 2):
            return Placement.loop(ranks, chunks), split
    if ranks > _SMALL and (found := _same_on(name, ranks, chunks, slices)) is not None:
        return found
    for microbatches in (ranks, 2 * ranks):
        try:
            made = family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices)
        except PipeloomError as error:
            refusal = error
        else:
            return made.placement, bool(made.split_backwards)
    raise ScheduleError(str(refusal))


def _same_on(name: str, ranks: int, chunks: int, slices: int) -> tuple[Placement, bool] | None:
    """The shape on many ranks, where that on few ranks is one of the usual ones.

    Raises:
        ScheduleError: the schedule does not support these numbers.
    """
    placement, split = shape_of(name, _SMALL, chunks, slices)
    if placement == Placement.loop(_SMALL, chunks):
        return Placement.loop(ranks, chunks), split
    if placement == Placement.v(_SMALL, chunks):
        return Placement.v(ranks, chunks), split
    if placement == Placement.bidirectional(_SMALL):
        return Placement.bidirectional(ranks), split
    return None
