"""The space of configurations as a tree whose nodes have lower bounds. No torch here.

    group     processes that share a stage, and the micro-batch size    work per device, warm-up of the fewest ranks
    mesh      + pipeline and data degree, micro-batches                 + warm-up and cool-down of single blocks, memory
    shape     + schedule, virtual stages, slices, order, blocks         `step_bound` without recomputation
    choice    + data strategy, recomputation, offload                   `step_bound`, data link, memory

Each level refuses configurations that cannot run or cannot fit, and counts them by reason.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.ir.data_axis import Granularity
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.options import Precision
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.links import ORDER
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.bounds import Recomputed, mixed_seconds
from pipeloom.plan.search.data_ways import way_bytes, ways_of, without_effect
from pipeloom.plan.search.memory.stage_bytes import KnownBytes
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.shapes import LEAST_TOKENS, MOST_SLICES, KnownShapes, Shapes, single_blocks
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim.data_link import gather_seconds, reduce_seconds

CanRun = Callable[[Configuration], str | None]  # why a configuration cannot run; None: it can
PENALTIES = {Granularity.STEP: 1.0, Granularity.CHUNK: 1.1, Granularity.MICROBATCH: 1.2}  # they hide less
MOST_TENSOR = 8  # processes, or those of a larger node: more share every product over a slow network
_FILLED = 4  # ranks: with fewer, a bidirectional schedule has no rank that waits
_INNER_DATA = ("pp", "cp", "dp", "tp")  # experts of neighbouring replicas are nearest
_INNER_CONTEXT = ("pp", "dp", "cp", "tp")
_OF_GROUPS = frozenset(  # keys of `Request.fixed` and `Request.forbidden` on which groups depend
    {"tensor", "context", "context_kind", "sequence", "expert", "microbatch_size", "precision", "gradients", "order"}
)


class Way(NamedTuple):
    """A mesh with a data strategy.

    Attributes:
        of: the configuration.
        states: bytes of model states per parameter, between steps.
        seconds: of a step without offload of activations, at least.
        peak: bytes of the rank that needs most, at least.
        offloaded: seconds of a step with offload, at least; infinite where there is none.
    """

    of: Configuration
    states: float
    seconds: float
    peak: float
    offloaded: float = inf

    @property
    def least(self) -> float:
        """Seconds of a step, at least."""
        return min(self.seconds, self.offloaded)


class Ways(NamedTuple):
    """The data strategies of a mesh, and the least of their values.

    Attributes:
        each: at least one.
        least, seconds, peak: see `Way`.
        penalty: how many times their bounds count.
        devices: of the mesh.
    """

    each: Sequence[Way]
    least: float
    seconds: float
    peak: float
    penalty: float
    devices: int

    @classmethod
    def of(cls, each: Sequence[Way]) -> "Ways":
        """Those of at least one strategy."""
        return cls(
            each,
            min(way.least for way in each),
            min(way.seconds for way in each),
            min(way.peak for way in each),
            min(PENALTIES[way.of.granularity] for way in each),
            each[0].of.devices,
        )


class Space:
    """All configurations of a request.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        refusals: where refused configurations are counted.
        can_run: asked for the processes of a stage alone.
        known: see `Shapes`.
        known_bytes: of stages, by which strategies are refused too; None: by model states alone.
    """

    def __init__(
        self,
        costs: StepCosts,
        request: Request,
        refusals: Refusals,
        can_run: CanRun,
        known: KnownShapes | None = None,
        known_bytes: KnownBytes | None = None,
    ) -> None:
        self.request, self.refusals, self._can_run = request, refusals, can_run
        self._known_bytes = known_bytes
        self.costs, self._least = costs.uncorrected
        self._known = known or KnownShapes()
        self.shapes = Shapes(costs, request, refusals, self._known)
        self._layers = costs.num_blocks
        kept = request.fixed.get("offload", 0)
        offloads = kept is not None and request.allows("offload", kept) and costs.can_offload
        keeps_all = not request.allows("offload_activations", kept)
        self._host_rate = costs.cluster.host_rate if offloads and not keeps_all else None
        self._offloads_states = "offload_states" in request.fixed or (
            offloads and request.allows("offload_states", True) and OPTIMIZERS[request.optimizer] > 0
        )
        self._most_slices = request.fixed.get("slices", MOST_SLICES if request.allows("slices", MOST_SLICES) else 1)
        self._of_replicas = without_effect(request)
        self._least_bytes: dict[object, float] = {}
        self._degrees: dict[int, list[tuple[int, int]]] = {}  # by ranks of all replicas, see `_degrees_of`

    def groups(self, *, counts: bool = True) -> Iterator[tuple[Configuration, int]]:
        """Configurations with degrees inside a stage and a micro-batch size, and their number of devices.

        Args:
            counts: whether to count those that are refused.
        """
        request, fixed = self.request, self.request.fixed
        sizes = request.devices, request.batch_size, request.optimizer, request.objective == "cost", request.precisions
        given = tuple((name, fixed[name]) for name in sorted(_OF_GROUPS & fixed.keys()))
        key = self._can_run, sizes, given, _OF_GROUPS & request.forbidden
        found = self._known.groups.get(key)
        if found is None:
            found = self._known.groups[key] = list(self._groups())
        for each in found:
            if not isinstance(each, str):
                yield each
            elif counts:
                self.refusals.add(each)

    def _groups(self) -> Iterator[tuple[Configuration, int] | str]:
        """`groups`, and why there are no others."""
        request, node = self.request, self.costs.cluster.devices_per_node
        numbers = divisors(request.devices) if request.objective == "cost" else [request.devices]
        sizes = [n for n in divisors(request.batch_size) if request.allows("microbatch_size", n)]
        for precision in self._precisions():
            if isinstance(precision, str):
                yield precision
                continue
            for inside in self._insides(node, precision):
                if isinstance(inside, str):
                    yield inside
                    continue
                for devices, size in product(numbers, sizes):
                    if devices % inside.processes:
                        continue
                    of = Configuration(
                        microbatch_size=size,
                        inside=inside,
                        precision=precision,
                        optimizer=request.optimizer,
                        order=request.fixed.get("order", _INNER_DATA if inside.expert > 1 else ORDER),
                    )
                    unknown = self.costs.unknown(of)
                    yield (of, devices) if unknown is None else unknown

    def _precisions(self) -> Iterator[Precision | str]:
        """Number formats, and why there are no others."""
        request = self.request
        names: tuple[Any, ...] = request.precisions or (request.fixed.get("precision", self._precision()),)
        for name in names:
            try:
                yield Precision(name, request.fixed.get("gradients", "float32"))
            except InputError as error:
                if len(names) == 1:
                    raise
                yield str(error).partition(":")[0]

    def _precision(self) -> str:
        """Tensor cores compute with 16-bit numbers."""
        device = self.costs.cluster.device
        return "fp32" if device.multiprocessors is None else device.half

    def _insides(self, node: int, precision: Precision) -> Iterator[InsideStage | str]:
        """The processes of a stage, and why there are no others."""
        request = self.request
        for tensor, context in product(divisors(request.devices), repeat=2):
            if request.devices % (tensor * context):
                continue
            if not request.allows("tensor", tensor) or not request.allows("context", context):
                continue
            if tensor > max(MOST_TENSOR, node) and "tensor" not in request.fixed:
                yield "tensor parallelism over many nodes"
                continue
            if context > 1 and self.costs.tokens < context * LEAST_TOKENS and "context" not in request.fixed:
                yield f"context parallelism with fewer than {LEAST_TOKENS} tokens per process"
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
                refusal = self._why_not_shared(inside, precision)
                yield inside if refusal is None else refusal

    def _why_not_shared(self, inside: InsideStage, precision: Precision) -> str | None:
        """Why processes cannot share a stage; None: they can."""
        of = Configuration(inside=inside, data=inside.expert, precision=precision, optimizer=self.request.optimizer)
        try:
            self.costs.check(of)
        except InputError as error:
            return f"{str(error).partition('=')[0]} cannot be divided"
        return self._can_run(of)

    def _turns(self, devices: int) -> float:
        """Processes per core of a machine with fewer cores."""
        measured = self.costs.cluster.measured
        return 1.0 if measured is None else max(1.0, devices / measured.cores)

    def group_bound(self, of: Configuration, devices: int) -> float:
        """Seconds of a step of a group, at least: its work, divided evenly between the devices, and its shortest fill.

        Infinite where no mesh of the group can run.
        """
        pipeline = self._least_pipeline(of, devices // of.inside.processes)
        if pipeline is None:
            return inf
        work, way = self._work(of)
        share = of.inside.processes / (devices * of.microbatch_size)
        return self._least * (
            work * self.request.batch_size * share * self._turns(devices) + self._fill(of, pipeline, way)
        )

    def _work(self, of: Configuration) -> tuple[float, float]:
        """Seconds of one micro-batch of a group, at least: of its computations, and of a way through a block and back.

        On a measured machine, the first micro-batch of a step may take another time than the others.
        """
        key, known = (of, self.request.batch_size), self._known.work
        if key not in known:
            most = of._replace(microbatches=self.request.batch_size // of.microbatch_size)
            ordered = [*self._orders(of), *self._orders(most)]
            extremes = {self.costs.same_seconds(each): each for each in ordered}.values()
            work = min(sum(map(sum, self.costs.stage_seconds(each))) for each in extremes)
            known[key] = work, min(map(self.shapes.least_way, extremes))
        return known[key]

    def _least_pipeline(self, of: Configuration, ranks: int) -> int | None:
        """The least pipeline-parallel degree whose states may fit."""
        request = self.request
        for pipeline, data in self._degrees_of(ranks):
            if self._why_no_mesh(of, pipeline, data) is not None:
                continue
            microbatches = request.batch_size // (data * of.microbatch_size)
            if not request.allows("microbatches", microbatches):
                continue
            key = of.precision, data * of.inside.context, microbatches == 1
            if key not in self._least_bytes:
                each = of._replace(pipeline=pipeline, data=data, microbatches=microbatches)
                ways = ways_of(each, request, offloads_states=self._offloads_states)
                self._least_bytes[key] = min(
                    (way_bytes(each, *way[:2], offload_states=way[2])[1] for way in ways), default=inf
                )
            if self._least_bytes[key] * self._parameters(of) / pipeline < request.memory_bytes:
                return pipeline
        return None

    def _degrees_of(self, ranks: int) -> list[tuple[int, int]]:
        """The pipeline- and data-parallel degrees that so many ranks may have."""
        if ranks not in self._degrees:
            allows, both = self.request.allows, [(pipeline, ranks // pipeline) for pipeline in divisors(ranks)]
            self._degrees[ranks] = [each for each in both if allows("pipeline", each[0]) and allows("data", each[1])]
        return self._degrees[ranks]

    def _why_no_mesh(self, of: Configuration, pipeline: int, data: int) -> str | None:
        """Why a group has no mesh of these degrees; None: it has."""
        if pipeline > self._layers:
            return "more pipeline ranks than blocks"
        if self.request.batch_size % (data * of.microbatch_size):
            return "replicas and micro-batch size do not divide the batch"
        if data % of.inside.expert:
            return "expert degree does not divide the replicas"
        if data * of.inside.context == 1 and self._of_replicas is not None:
            return f"{self._of_replicas} has no effect with one replica"
        return None

    def meshes(self, of: Configuration, devices: int) -> Iterator[Configuration]:
        """The configurations of a group, with pipeline-parallel and data-parallel degrees."""
        request = self.request
        for pipeline, data in self._degrees_of(devices // of.inside.processes):
            if (reason := self._why_no_mesh(of, pipeline, data)) is not None:
                self.refusals.add(reason)
            else:
                microbatches = request.batch_size // (data * of.microbatch_size)
                if request.allows("microbatches", microbatches):
                    yield of._replace(pipeline=pipeline, data=data, microbatches=microbatches)

    def ways(self, of: Configuration) -> Iterator[Way]:
        """The configurations of a mesh, with a data strategy each; those whose states do not fit are left out."""
        share = self._parameters(of) / of.pipeline
        sizes, turns = {"microbatches": of.microbatches, "ranks": of.pipeline}, self._turns(of.devices)
        kinds: Recomputed | None = None  # found for the first strategy whose states fit
        fill = 0.0
        for strategy, granularity, offload_states in ways_of(of, self.request, offloads_states=self._offloads_states):
            between, least = way_bytes(of, strategy, granularity, offload_states=offload_states)
            states = least * share
            if states >= self.request.memory_bytes:
                self.refusals.too_large()
                continue
            if kinds is None:
                kinds, fill = self._recomputed(of), self._fill(of, of.pipeline, self._least_way(of))
            each = of._replace(strategy=strategy, granularity=granularity, offload_states=offload_states)
            if self._known_bytes is not None:
                if not self._host_rate:  # all ranks hold a micro-batch when its first backward begins
                    states = max(states, share * between + kinds.least_kept / of.pipeline)
                head = self._known_bytes.of_head(self.costs, each, self.request.kinds, self._slices(of))
                if max(states, head) >= self.request.memory_bytes:
                    self.refusals.too_large()
                    continue
            # Gradients are not there yet while the first activations are.
            room = of.pipeline * (self.request.memory_bytes - share * between)
            work = turns * mixed_seconds(kinds.points(**sizes, room=room))
            other = inf
            if self._host_rate:
                more = of.pipeline * self._host_rate * kinds.longest / 2
                other = mixed_seconds(kinds.points(**sizes, room=room + more))
                work = other if "offload" in self.request.fixed else work
            if min(work, other) == inf:
                self.refusals.too_large()
                continue
            update = self.costs.update_seconds(each, [[0]]) if of.pipeline == 1 else 0.0
            link = self._link_bound(each, share)
            without, with_offload = (self._least * max(busy + fill + update, link) for busy in (work, other))
            yield Way(of=each, states=between, seconds=without, peak=states, offloaded=with_offload)

    def _parameters(self, of: Configuration) -> float:
        """Elements of the parameters of one pipeline on one process of each stage."""
        sizes = self._known.sizes
        if of.inside not in sizes:
            sizes[of.inside] = sum(self.costs.parameters(of._replace(pipeline=1, blocks=None)))
        return sizes[of.inside]

    def _recomputed(self, of: Configuration) -> Recomputed:
        kinds, known = self.request.kinds, self._known.recomputed
        key = kinds, self.costs.same_seconds(of)
        if key not in known:
            single = single_blocks(of, self._layers)
            known[key] = Recomputed(
                {kind: self._least_seconds(single._replace(recompute=kind)) for kind in kinds},
                {kind: self.costs.kept_bytes(single._replace(recompute=kind)) for kind in kinds},
            )
        return known[key]

    def _least_seconds(self, of: Configuration) -> list[Seconds]:
        """Seconds of every stage, at least, whatever the order of the mesh axes."""
        first, *others = [self.costs.stage_seconds(each) for each in self._orders(of)]
        for other in others:
            first = [Seconds(*map(min, a, b)) for a, b in zip(first, other, strict=True)]
        return first

    def _link_bound(self, of: Configuration, parameters: float) -> float:
        """Seconds for which the data link of a rank is busy."""
        if of.replicas == 1 or self.costs.has_experts:
            return 0.0
        network = self.costs.network(of._replace(order=_INNER_DATA, pipeline=1))  # the fastest links
        formats, data = NumberBytes.of(of.precision), of.data_axis()
        gathers = gather_seconds(data, formats.compute * parameters, network)
        sums = reduce_seconds(data, formats.gradient * parameters, network)
        if of.granularity is not Granularity.MICROBATCH:
            return gathers + sums
        return of.microbatches * ((2 * gathers if of.strategy.shards_parameters else 0.0) + sums)

    def _fill(self, of: Configuration, ranks: int, way: float) -> float:
        """Seconds in which a rank of so many waits for others, at least; `way` are those through a block and back."""
        return (ranks // 2 - 1) * way / self._slices(of) if ranks >= _FILLED else 0.0

    def _slices(self, of: Configuration) -> int:
        """The most slices of a micro-batch."""
        return self._most_slices if of.inside.context == 1 else 1

    def _orders(self, of: Configuration) -> list[Configuration]:
        """The configuration with orders of its mesh axes of which one has the fastest links inside a stage."""
        if of.inside.expert > 1 and of.inside.context > 1 and "order" not in self.request.fixed:
            return [of, of._replace(order=_INNER_CONTEXT)]
        return [of]

    def _least_way(self, of: Configuration) -> float:
        return min(map(self.shapes.least_way, self._orders(of)))
