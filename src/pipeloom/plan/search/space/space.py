"""`Space`: the configurations of a request, level by level, see `pipeloom.plan.search.space`. No torch here."""

from collections.abc import Iterator
from math import inf

from pipeloom.common.division import divisors
from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.memory.stage_bytes import KnownBytes
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.space.bounds import Recomputed, mixed_seconds
from pipeloom.plan.search.space.groups import INNER_DATA, CanRun, Groups
from pipeloom.plan.search.space.shapes import MOST_SLICES, KnownShapes, Shapes, single_blocks
from pipeloom.plan.search.space.ways import Way, one_stage_each, way_bytes, ways_of, without_effect
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim.data_link import gather_seconds, reduce_seconds

_FILLED = 4  # ranks: with fewer, a bidirectional schedule has no rank that waits
_INNER_CONTEXT = ("pp", "dp", "cp", "tp")


class Space:
    """All configurations of a request.

    Args:
        costs: of the model on its cluster.
        request: what is planned.
        refusals: where refused configurations are counted.
        can_run: asked for the processes of a stage alone.
        known: see `Shapes`.
        known_bytes: of stages, by which strategies are refused too; None: by model states alone.

    Attributes:
        groups, shapes: all of them.
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
        self.request, self.refusals = request, refusals
        self._known_bytes = known_bytes
        self.costs, self._least = costs.uncorrected
        self._known = known or KnownShapes()
        self.groups = Groups(self.costs, request, refusals, can_run, self._known)
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
        self._of_replicas, self._one_stage = without_effect(request), one_stage_each(request)
        self._least_bytes: dict[object, float] = {}
        self._degrees: dict[int, list[tuple[int, int]]] = {}  # by ranks of all replicas, see `_degrees_of`

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
                self._least_bytes[key] = min((self._way_bytes(each, *way)[1] for way in ways), default=inf)
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
            between, least = self._way_bytes(of, strategy, granularity, offload_states)
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

    def _way_bytes(
        self, of: Configuration, strategy: DataStrategy, granularity: Granularity, offload_states: bool
    ) -> tuple[float, float]:
        return way_bytes(of, strategy, granularity, offload_states=offload_states, one_stage=self._one_stage)

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
        order = of.order if "order" in self.request.fixed else INNER_DATA  # which has the fastest links
        network = self.costs.network(of._replace(order=order, pipeline=1))
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
