"""The space of configurations as a tree whose nodes have lower bounds. No torch here.

    Group     processes that share a stage, and the micro-batch size    work per device, ideal
    Mesh      + pipeline and data degree, micro-batches                 + warm-up and cool-down of single blocks
    Shape     + schedule, virtual stages, slices, order, blocks         `step_bound` without recomputation
    Plan      + data strategy, recomputation, offload                   `step_bound`, data link, memory

Each level refuses configurations that cannot run or cannot fit, and counts them by reason.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import permutations, product
from math import inf
from typing import NamedTuple

from pipeloom import schedules
from pipeloom.errors import InputError, PipeloomError, ScheduleError
from pipeloom.ir import Placement
from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.options import Precision
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_bound import message_seconds, pipeline_bound
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.balance import balanced_blocks
from pipeloom.plan.search.bounds import Point, mixed_seconds, recomputed_points
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim.data_link import gather_seconds, reduce_seconds
from pipeloom.split.chain_partition import even_parts

_MOST_TENSOR = 8  # processes, or those of a larger node: more share every product over a slow network
_LEAST_TOKENS = 256  # of a process or slice
_MOST_CHUNKS = 16
_SLICES = (1, 2, 4, 8, 16)
_INNER_DATA = ("pp", "dp", "cp", "tp")  # experts of neighbouring replicas are nearest
_MOST_SPLIT = 16  # micro-batches of one schedule to look at its shape


# Those that hold and communicate least first. Granularities of zero1 are the same.
_WAYS = (
    (DataStrategy.DDP, Granularity.STEP),
    (DataStrategy.ZERO1, Granularity.STEP),
    (DataStrategy.ZERO2, Granularity.STEP),
    (DataStrategy.ZERO3, Granularity.STEP),
    (DataStrategy.ZERO2, Granularity.CHUNK),
    (DataStrategy.ZERO3, Granularity.CHUNK),
    (DataStrategy.ZERO2, Granularity.MICROBATCH),
    (DataStrategy.ZERO3, Granularity.MICROBATCH),
)


class Shape(NamedTuple):
    """A configuration with a schedule, and what follows from it."""

    of: Configuration
    placement: Placement
    split: bool


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


class Space:
    """All configurations of a request.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        refusals: where refused configurations are counted.
    """

    def __init__(self, costs: CostModel, request: Request, refusals: Refusals) -> None:
        self.costs, self.request, self.refusals = costs, request, refusals
        self._layers = costs.num_blocks
        self._by_kind: dict[object, tuple[dict[Recompute, list[Seconds]], dict[Recompute, list[float]]]] = {}
        self._single: dict[object, list[Seconds]] = {}
        self._bounds: dict[object, float] = {}

    def groups(self) -> Iterator[tuple[Configuration, int]]:
        """Configurations with degrees inside a stage and a micro-batch size, and their number of devices."""
        request, node = self.request, self.costs.cluster.devices_per_node
        numbers = divisors(request.devices) if request.objective == "cost" else [request.devices]
        precision = Precision(request.fixed.get("precision", self._precision()))
        sizes = [n for n in divisors(request.batch_size) if request.allows("microbatch_size", n)]
        for inside in self._insides(node):
            for devices in numbers:
                if devices % inside.processes:
                    continue
                for size in sizes:
                    of = Configuration(
                        microbatch_size=size,
                        inside=inside,
                        precision=precision,
                        optimizer=request.optimizer,
                        order=request.fixed.get("order", _INNER_DATA if inside.expert > 1 else ORDER),
                    )
                    yield of, devices

    def _precision(self) -> str:
        """Tensor cores compute with 16-bit numbers."""
        return "fp32" if self.costs.cluster.device.multiprocessors is None else "bf16"

    def _insides(self, node: int) -> Iterator[InsideStage]:
        request = self.request
        for tensor, context in product(divisors(request.devices), repeat=2):
            if request.devices % (tensor * context):
                continue
            if not request.allows("tensor", tensor) or not request.allows("context", context):
                continue
            if tensor > max(_MOST_TENSOR, node) and "tensor" not in request.fixed:
                self.refusals.add("tensor parallelism over many nodes")
                continue
            if context > 1 and self.costs.tokens < context * _LEAST_TOKENS and "context" not in request.fixed:
                self.refusals.add(f"context parallelism with fewer than {_LEAST_TOKENS} tokens per process")
                continue
            experts = [n for n in self.costs.expert_degrees if request.allows("expert", n)]
            kinds = [kind for kind in ("ring", "ulysses") if request.allows("context_kind", kind)]
            for sequence, kind, expert in product((False, True), kinds if context > 1 else ["ring"], experts):
                if (sequence and tensor == 1) or not request.allows("sequence", sequence):
                    continue
                inside = InsideStage(
                    tensor=tensor,
                    context=context,
                    sequence=sequence,
                    context_kind="ulysses" if kind == "ulysses" else "ring",
                    expert=expert,
                )
                if self._can_share(inside):
                    yield inside

    def _can_share(self, inside: InsideStage) -> bool:
        try:
            self.costs.check(Configuration(inside=inside))
        except InputError as error:
            self.refusals.add(f"{str(error).partition('=')[0]} cannot be divided")
            return False
        return True

    def group_bound(self, of: Configuration, devices: int) -> float:
        """Seconds of the work of a step, divided evenly."""
        work = sum(map(sum, self.costs.stage_seconds(of)))
        return work * self.request.batch_size * of.inside.processes / (devices * of.microbatch_size)

    def meshes(self, of: Configuration, devices: int) -> Iterator[Configuration]:
        """With pipeline and data degrees."""
        request, inside = self.request, of.inside
        ranks = devices // inside.processes
        for pipeline in divisors(ranks):
            data = ranks // pipeline
            if not request.allows("pipeline", pipeline) or not request.allows("data", data):
                continue
            if pipeline > self._layers:
                self.refusals.add("more pipeline ranks than blocks")
            elif request.batch_size % (data * of.microbatch_size):
                self.refusals.add("replicas and micro-batch size do not divide the batch")
            elif data % inside.expert:
                self.refusals.add("expert degree does not divide the replicas")
            else:
                microbatches = request.batch_size // (data * of.microbatch_size)
                if request.allows("microbatches", microbatches):
                    yield replace(of, pipeline=pipeline, data=data, microbatches=microbatches)

    def ways(self, of: Configuration) -> Iterator[tuple[Configuration, float]]:
        """With a data strategy, and the seconds of a step at least; those whose states do not fit are left out."""
        parameters = sum(self.costs.parameters(replace(of, pipeline=1, blocks=None)))
        share = parameters / of.pipeline
        blocks = self._block_seconds(of)
        way = min(each.forward + each.backward_input for each in blocks)
        fill = max(0, of.pipeline // 2 - 1) * way
        for strategy, granularity in ways_of(of, self.request):
            each = replace(of, strategy=strategy, granularity=granularity)
            states = least_state_bytes(each, share, self._layers)
            room = of.pipeline * (self.request.memory_bytes - states)
            if room <= 0:
                self.refusals.too_large(states)
                continue
            points = self._points(each, room)
            work = mixed_seconds(points)
            if work == inf:
                self.refusals.too_large(states)
                continue
            update = self.costs.update_seconds(each, [[0]]) if of.pipeline == 1 else 0.0
            yield each, max(work + fill + update, self._link_bound(each, share))

    def _points(self, of: Configuration, room: float) -> list[Point]:
        kinds = self.request.kinds
        key = of.inside, of.microbatch_size, of.element, of.strides["tp"]
        found = self._by_kind.get(key)
        if found is None:
            single = replace(of, pipeline=self._layers, chunks=1, blocks=None)
            found = self._by_kind[key] = (
                {kind: self.costs.stage_seconds(replace(single, recompute=kind)) for kind in kinds},
                {kind: self.costs.kept_bytes(replace(single, recompute=kind)) for kind in kinds},
            )
        return recomputed_points(*found, microbatches=of.microbatches, ranks=of.pipeline, room=room)

    def _link_bound(self, of: Configuration, parameters: float) -> float:
        """Seconds for which the data link of a rank is busy, with the fastest links."""
        if of.replicas == 1:
            return 0.0
        formats, data = NumberBytes.of(of.precision), of.data_axis()
        if self.costs.expert_degrees != [1]:
            return 0.0
        network = self.costs.network(replace(of, order=("pp", "dp", "cp", "tp")))
        gathers = gather_seconds(data, formats.compute * parameters, network)
        sums = reduce_seconds(data, formats.gradient * parameters, network)
        if of.granularity is not Granularity.MICROBATCH:
            return gathers + sums
        return of.microbatches * ((2 * gathers if of.strategy.shards_parameters else 0.0) + sums)

    def _block_seconds(self, of: Configuration) -> list[Seconds]:
        """Of single blocks; the first has the embedding and the last the head."""
        key = of.inside, of.microbatch_size, of.element, of.slices, of.order, of.data, of.pipeline
        if key not in self._single:
            single = replace(of, pipeline=self._layers, chunks=1, blocks=None, recompute=Recompute.NONE)
            self._single[key] = self.costs.stage_seconds(single)
        return self._single[key]

    def shapes(self, of: Configuration) -> Iterator[Shape]:
        """With schedule, virtual stages, slices, order of axes, and blocks per stage."""
        request = self.request
        orders = [request.fixed["order"]] if "order" in request.fixed else self.orders(of)
        for name, family in schedules.SYNCHRONOUS.items():
            if not request.allows("schedule", name) or (name == "search" and "schedule" not in request.fixed):
                continue
            if of.pipeline == 1 and name != request.fixed.get("schedule", "1f1b"):
                continue
            chunks = range(1, _MOST_CHUNKS + 1) if family.chunks is None else [family.chunks]
            slices = [n for n in (_SLICES if family.sliced else (1,)) if self._can_slice(of, n)]
            if "slices" in request.fixed:
                slices = [request.fixed["slices"]] if family.sliced or request.fixed["slices"] == 1 else []
            if "chunks" in request.fixed and family.chunks is None:
                chunks = [request.fixed["chunks"]]
            for chunk, pieces in product(chunks, slices):
                if not request.allows("chunks", chunk) or chunk * of.pipeline > self._layers * (
                    2 if family.chunks == 2 else 1
                ):
                    continue
                yield from self._shaped(replace(of, schedule=name, chunks=chunk, slices=pieces), orders)

    def _shaped(self, of: Configuration, orders: Sequence[tuple[str, ...]]) -> Iterator[Shape]:
        try:
            placement, split = shape_of(of.schedule, of.pipeline, of.chunks, of.slices)
        except ScheduleError:
            self.refusals.add("the schedule does not support the sizes")
            return
        if placement.num_stages > self._layers:
            self.refusals.add("more stages than blocks")
            return
        for order in orders:
            ordered = replace(of, order=order)
            for blocks in self._blocks(ordered, placement):
                yield Shape(replace(ordered, blocks=blocks), placement, split)

    def _can_slice(self, of: Configuration, slices: int) -> bool:
        parts = of.inside.tensor if of.inside.sequence else 1
        tokens = self.costs.tokens
        return slices == 1 or (
            of.inside.context == 1
            and tokens % (slices * parts) == 0
            and tokens // slices >= _LEAST_TOKENS
            and self.costs.can_slice
        )

    def _blocks(self, of: Configuration, placement: Placement) -> list[tuple[int, ...]]:
        """Even ones, and those with the least work of the rank that has most."""
        given = self.request.fixed.get("blocks")
        if given is not None:
            return [given] if len(given) == placement.num_stages and sum(given) == self._layers else []
        even = tuple(even_parts(self._layers, placement.num_stages))
        seconds = [sum(each) for each in self._block_seconds(of)]
        return list(dict.fromkeys((even, balanced_blocks(seconds, placement))))

    def orders(self, of: Configuration) -> list[tuple[str, ...]]:
        """Orders of the axes of which none has links at least as fast as another's for everything."""
        degrees = {"dp": of.data, "pp": of.pipeline, "cp": of.inside.context}
        axes = [axis for axis, degree in degrees.items() if degree > 1]
        found: dict[tuple[str, ...], tuple[float, ...]] = {}
        for chosen in permutations(axes):
            order = (*(axis for axis in ORDER if axis not in (*chosen, "tp")), *chosen, "tp")
            found[order] = self._link_seconds(replace(of, order=order))
        unique = {costs: order for order, costs in reversed(found.items())}
        return [
            order
            for costs, order in unique.items()
            if not any(other != costs and all(map(float.__le__, other, costs)) for other in unique)
        ]

    def _link_seconds(self, of: Configuration) -> tuple[float, ...]:
        """Of messages between stages, of data-parallel sums, and of work, whose collectives use links too."""
        network = self.costs.network(of)
        rate = network.data_sum_bytes_per_second or network.data_bytes_per_second or inf
        table = network.latency_seconds
        latency = max(map(max, table)) if isinstance(table, tuple) else table
        near = 1 / (network.bytes_per_second or inf)
        far = [1 / (link.bytes_per_second or inf) for link in network.links]
        work = sum(map(sum, self.costs.stage_seconds(of)))
        sums = 1 / rate if of.replicas > 1 else 0.0
        return (max([near, *far]), near + sum(far), latency, sums, work)

    def shape_bound(self, shape: Shape) -> float:
        """`step_bound` without recomputation and update."""
        of = shape.of
        key = of.inside, of.microbatch_size, of.pipeline, of.data, of.order, of.slices, of.blocks, shape[1:]
        if key not in self._bounds:
            self._bounds[key] = pipeline_seconds(self.costs, shape)
        return self._bounds[key]


def least_state_bytes(of: Configuration, parameters: float, blocks: int) -> float:
    """Bytes of a rank beside activations, at least.

    Args:
        of: the configuration.
        parameters: of the rank.
        blocks: of the model; gathered and full gradients of fine granularities are of a block at least.
    """
    formats = NumberBytes.of(of.precision)
    each = state_bytes_per_parameter(of)
    sharded = of.strategy.shards_gradients and of.granularity is not Granularity.STEP
    each += formats.gradient / (of.replicas if sharded else 1)
    if of.strategy.shards_parameters and of.granularity is Granularity.STEP:
        each += formats.compute
    return each * parameters


def pipeline_seconds(costs: CostModel, shape: Shape) -> float:
    """The bound of `pipeline_bound` for a shape."""
    of = shape.of
    stages, count = costs.stage_seconds(of), of.slices
    each = [Seconds(*(seconds / count for seconds in stage)) for stage in stages] if count > 1 else stages
    message = message_seconds(costs, of)
    return pipeline_bound(each, shape.placement, of.microbatches * count, message, split=shape.split)


def state_bytes_per_parameter(of: Configuration) -> float:
    """Bytes of parameters, masters and optimizer states per parameter of a stage, between steps."""
    formats, data = NumberBytes.of(of.precision), of.data_axis()
    shards = of.replicas if data.strategy.shards_optimizer else 1
    each = 0.0 if data.strategy.shards_parameters else float(formats.compute)
    if formats.has_masters or data.strategy.shards_parameters:
        each += 4 / shards
    return each + 4 * OPTIMIZERS[of.optimizer] / shards


def ways_of(of: Configuration, request: Request) -> list[tuple[DataStrategy, Granularity]]:
    """Data strategies and granularities that have an effect."""
    ways = [
        (strategy, granularity)
        for strategy, granularity in (*_WAYS, (DataStrategy.PARAMETER_SERVER, Granularity.STEP))
        if request.allows("data_strategy", strategy)
        and request.allows("data_granularity", granularity)
        and (strategy is not DataStrategy.PARAMETER_SERVER or "data_strategy" in request.fixed)
    ]
    if of.replicas == 1:
        return [(DataStrategy.DDP, Granularity.STEP)] if (DataStrategy.DDP, Granularity.STEP) in ways else []
    return ways


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
    if ranks > _MOST_SPLIT and _on_loop(name, chunks, slices):
        return Placement.loop(ranks, chunks), shape_of(name, _MOST_SPLIT, chunks, slices)[1]
    for microbatches in (ranks, 2 * ranks):
        try:
            made = family(num_ranks=ranks, num_microbatches=microbatches, num_chunks=number, num_slices=slices)
        except PipeloomError as error:
            refusal = error
        else:
            return made.placement, bool(made.split_backwards)
    raise ScheduleError(str(refusal))


def _on_loop(name: str, chunks: int, slices: int) -> bool:
    """Whether stages go round the ranks."""
    return shape_of(name, _MOST_SPLIT, chunks, slices)[0] == Placement.loop(_MOST_SPLIT, chunks)
