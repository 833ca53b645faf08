"""`CostModel`: from a transformer, a cluster and a configuration to the seconds and bytes of a step. No torch here."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

from pipeloom.common.division import divisors
from pipeloom.errors import InputError
from pipeloom.ir import Op, Placement, Program
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel import Precision
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.links import data_links, pipeline_network
from pipeloom.plan.costs.measured_layers import scaled_layers
from pipeloom.plan.costs.measured_links import (
    exchange_seconds,
    measured_network,
    shared_links,
    slower_network,
    step_end_seconds,
)
from pipeloom.plan.costs.shared_sums import exchanged_seconds
from pipeloom.plan.costs.software import PIPELOOM, Software
from pipeloom.plan.costs.stage_bytes import StageBytes
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.local.layer_times import LayerTimes
from pipeloom.plan.local.references import Corrections, References
from pipeloom.plan.memory import OPTIMIZERS, MemoryModel, memory_of_ranks
from pipeloom.plan.memory.choose import stage_bytes
from pipeloom.plan.memory.state_bytes import NEED_FULL_MATRICES, NumberBytes
from pipeloom.plan.stage_times import Seconds, StageTimes
from pipeloom.sim import Costs, Network, Timeline
from pipeloom.sim.costs import MOST_UNITS


class _Layers(NamedTuple):
    """Seconds of embedding, head, blocks without and with experts; bytes of a message; a stage beside its layers."""

    embedding: Seconds
    head: Seconds
    blocks: dict[bool, Seconds]
    message_bytes: float
    more: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """A step of one configuration.

    Attributes:
        step_seconds: makespan and the optimizer's update.
        update_seconds: of the update.
        timeline: simulated.
    """

    step_seconds: float
    update_seconds: float
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class CostModel(StepCosts):
    """Costs of configurations of one transformer on one cluster; costs of layers are kept between calls.

    Attributes:
        model: the sizes.
        cluster: where it is trained.
        software: what computes.
        measured: seconds of the model's layers on a measured machine; None: its tables alone.
        corrections: by measured steps of as many processes.
    """

    model: Architecture
    cluster: Cluster
    software: Software = PIPELOOM
    measured: LayerTimes | None = None
    corrections: Corrections = field(default_factory=Corrections)
    _layers: dict[object, "_Layers"] = field(default_factory=dict, repr=False, compare=False)
    _others: dict[object, tuple[StageTimes, "_Layers"]] = field(  # with any recomputation
        default_factory=dict, repr=False, compare=False
    )
    _networks: dict[object, Network] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        """Blocks, which stages consist of."""
        return self.model.layers

    @property
    def name(self) -> str:
        """The model, for output."""
        return self.model.name

    @property
    def tokens(self) -> int:
        """Tokens per sample."""
        return self.model.sequence_length

    @property
    def merges_backwards(self) -> bool:
        return self.measured is not None

    @property
    def expert_degrees(self) -> list[int]:
        """Expert-parallel degrees that divide the experts."""
        return divisors(self.model.experts.experts if self.model.experts else 1)

    def unknown(self, of: Configuration) -> str | None:
        if self.cluster.measured is not None and self.measured is None and of.precision.dtype == "fp16":
            return f"precision=fp16: cluster {self.cluster.name} has no times of it; processors are slow in fp16"
        if not self.cluster.device.bfloat16 and of.precision.dtype == "bf16":
            return f"precision=bf16: {self.cluster.device.name} computes it slowly, and fp16 at its full rate"
        return None

    def operations(self, of: Configuration) -> float:
        """Operations of the model per step, of all devices; nothing that is repeated counts."""
        return self.times(of, Recompute.NONE).operations() / of.microbatch_size * of.batch_size

    def check(self, of: Configuration) -> None:
        """Raises InputError for sizes that processes cannot share."""
        of.inside.check(self.model.layer_sizes(of.microbatch_size, 1))

    def times(self, of: Configuration, recompute: Recompute) -> StageTimes:
        """The times of layers with one kind of recomputation."""
        return StageTimes(
            model=self.model,
            inside=of.inside,
            cluster=self.cluster.beside(of.devices),
            samples=of.microbatch_size,
            element=of.element,
            recompute=recompute,
            imbalance=of.imbalance,
            degrees={"dp": of.data, "pp": of.pipeline},
            order=of.order,
            software=self.software,
            slices=of.slices,
        )

    def _same_layers(self, of: Configuration) -> tuple[object, ...]:
        """What seconds of single layers depend on, beside recomputation and corrections."""
        shared = [axis for axis, degree in (("dp", of.inside.expert), ("cp", of.inside.context)) if degree > 1]
        apart = tuple(of.strides[axis] for axis in shared) if shared else ()
        beside = of.devices if self.cluster.measured else 1
        turns = of.microbatches if self.measured else 0
        sizes = of.microbatch_size, of.element, of.imbalance, of.slices, beside, turns
        return of.inside, sizes, of.tensor_stride, apart

    def same_blocks(self, start: int, end: int) -> Hashable:
        return end - start, start % self.model.experts_every, max(0, self.model.dense_blocks - start)

    def same_seconds(self, of: Configuration) -> Hashable:
        return self._same_layers(of), self.corrections.factor(of)

    def _of_layers(self, of: Configuration, recompute: Recompute) -> "_Layers":
        same = self._same_layers(of)
        found = self._layers.get((same, recompute))
        if found is None:
            kinds = self._block_kinds
            if self.measured is not None and self.measured.element == of.element:
                times = self.times(of, recompute)
                embedding, head, blocks, stage = scaled_layers(self.measured, times, kinds, of.microbatches)
                found = _Layers(embedding, head, blocks, times.message_bytes(), stage)
            elif (other := self._others.get(same)) is not None:  # recomputed are blocks alone
                times, found = other
                blocks = {experts: times.block(experts=experts, recompute=recompute) for experts in kinds}
                found = found._replace(blocks=blocks)
            else:
                times, more = self.times(of, recompute), _NOTHING
                rates = times.cluster.rates
                if rates is not None:
                    more = Seconds(rates.second("stage forward"), rates.second("stage backward"), 0.0)
                blocks = {experts: times.block(experts=experts) for experts in kinds}
                found = _Layers(times.embedding(), times.head(), blocks, times.message_bytes(), more)
                self._others[same] = times, found
            self._layers[same, recompute] = found
        return found

    @cached_property
    def _bytes(self) -> StageBytes:
        return StageBytes(self.model, self.software)

    @cached_property
    def _block_kinds(self) -> set[bool]:
        """Whether blocks have experts, for all kinds of blocks."""
        return {self.model.has_experts(index) for index in range(self.model.layers)}

    @cached_property
    def _experts_before(self) -> list[int]:
        """Blocks with experts before each block."""
        found = [0]
        for index in range(self.model.layers):
            found.append(found[-1] + self.model.has_experts(index))
        return found

    def stage_seconds(self, of: Configuration) -> list[Seconds]:
        """Seconds of F, I and W of every stage on one micro-batch; the first has the embedding, the last the head."""
        counts, kinds = of.blocks_of(self.model.layers), self._block_kinds
        layers = self._of_layers(of, of.recompute_of(0))
        if isinstance(of.recompute, Recompute) and len(kinds) == 1:
            block = layers.blocks[next(iter(kinds))]
            of_counts = {count: block.times(count) for count in set(counts)}
            found = [of_counts[count] for count in counts]
        else:
            found = self._mixed_seconds(of, counts)
        found[0] += layers.embedding
        found[-1] += layers.head
        slower = self.corrections.factor(of)
        return found if slower == 1.0 else [each.times(slower) for each in found]

    def _mixed_seconds(self, of: Configuration, counts: Sequence[int]) -> list[Seconds]:
        """Seconds of stages with these numbers of blocks, of different kinds or with different recomputation."""
        found, start, before = [], 0, self._experts_before
        made: dict[tuple[int, int, Recompute], Seconds] = {}
        for stage, count in enumerate(counts):
            recompute = of.recompute_of(stage)
            mixed = before[start + count] - before[start]
            start += count
            if (count, mixed, recompute) not in made:
                blocks = self._of_layers(of, recompute).blocks
                plain, experts = blocks.get(False, _NOTHING), blocks.get(True, _NOTHING)
                pairs = zip(plain, experts, strict=True)
                made[count, mixed, recompute] = Seconds(*((count - mixed) * a + mixed * b for a, b in pairs))
            found.append(made[count, mixed, recompute])
        return found

    @property
    def uncorrected(self) -> tuple["CostModel", float]:
        if not self.corrections.ratios:
            return self, 1.0
        return replace(self, corrections=Corrections()), self.corrections.least

    def corrected_by(self, references: References, precision: Precision) -> Self:
        """The same costs, corrected by reference steps in these number formats."""
        plain = replace(self, corrections=Corrections())
        found = Corrections.of(references, lambda of: plain.predict(of).step_seconds, self.model.layers, precision)
        return replace(self, corrections=found)

    def message_bytes(self, of: Configuration) -> float:
        """Bytes from one stage to the next, per process and micro-batch."""
        return self._of_layers(of, of.recompute_of(0)).message_bytes

    def memory_model(self, of: Configuration) -> MemoryModel:
        """What memory forecasts need."""
        return MemoryModel(
            stages=self._bytes.layers(of),
            precision=of.precision,
            optimizer=of.optimizer,
            recompute=tuple(map(of.recompute_of, range(of.stages))),
            device="cuda" if self.cluster.measured is None else "cpu",
            expert=of.inside.expert,
            whole_parameters=of.optimizer in NEED_FULL_MATRICES,
            elsewhere=frozenset({"optimizer"}) if of.offload_states else frozenset(),
        )

    def costs(self, of: Configuration) -> Costs:
        """Seconds and bytes of every stage, for the simulator."""
        more = self._of_layers(of, of.recompute_of(0)).more.times(self.corrections.factor(of))
        stages, memory = [each + more for each in self.stage_seconds(of)], self.memory_model(of)
        parameters, gradients = stage_bytes(memory, of.replicas)
        splits = self._splits(of, stages)
        return Costs(
            forward=tuple(each.forward for each in stages),
            backward_input=tuple(split * each.backward_input for each, split in zip(stages, splits, strict=True)),
            backward_weight=tuple(split * each.backward_weight for each, split in zip(stages, splits, strict=True)),
            backward=tuple(each.backward_input + each.backward_weight for each in stages),
            message_bytes=(self.message_bytes(of),) * of.stages,
            activation_bytes=tuple(memory.kept_bytes(stage) for stage in range(of.stages)),
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            other=self._copies(of, gradients),
            units=tuple(self.stage_units(of)),
        )

    def _splits(self, of: Configuration, stages: Sequence[Seconds]) -> list[float]:
        """For every stage, seconds of I and W over those of a whole backward."""
        if self.measured is None:
            return [1.0] * len(stages)
        block, head = self.measured.splits(of.microbatch_size)
        found, last = [block] * len(stages), stages[-1].backward_input + stages[-1].backward_weight
        own = self._of_layers(of, of.recompute_of(0)).head
        part = self.corrections.factor(of) * (own.backward_input + own.backward_weight) / last if last else 0.0
        found[-1] = part * head + (1 - part) * block
        return found

    def stage_units(self, of: Configuration) -> list[int]:
        """Embedding, blocks, norm and head are units, up to a number per stage."""
        numbers = of.blocks_of(self.model.layers)
        numbers[0] += 1
        numbers[-1] += 2
        return [min(MOST_UNITS, number) for number in numbers]

    def _copies(self, of: Configuration, gradients: Sequence[float]) -> dict[Op, tuple[float, ...]]:
        """On a measured machine, seconds in which gradients are copied into flat memory, and their sums divided."""
        if self.cluster.measured is None or of.replicas == 1:
            return {}
        kernels = KernelTimes(self.cluster.beside(of.devices), of.element)
        turns = self.corrections.factor(of) * max(1.0, of.devices / of.pipeline / self.cluster.measured.cores)
        return {Op.REDUCE_GRAD: tuple(turns * kernels.elementwise(4 * size, 2) for size in gradients)}

    def network(self, of: Configuration) -> Network:
        """The links between stages, and between processes with the same parameters."""
        at, inside = of.strides, of.inside
        stride = (
            at["cp"] if of.data == 1 else at["dp"] // (inside.context if at["dp"] == at["cp"] * inside.context else 1)
        )
        cluster = self.cluster.beside(of.devices)
        if cluster.measured is not None:
            data = data_links(cluster, stride=stride, replicas=of.replicas)
            data |= shared_links(cluster, of.strategy, has_masters=of.precision.has_masters)
            network = measured_network(cluster, self.message_bytes(of) / of.slices, data)
            return slower_network(network, self.corrections.factor(of))
        key = stride, of.replicas, of.pipeline, at["pp"]
        found = self._networks.get(key)
        if found is None:
            busy = self.software.message_seconds / 2
            found = self._networks[key] = pipeline_network(
                self.cluster,
                ranks=of.pipeline,
                stride=at["pp"],
                waits=self.software.waits,
                send_seconds=busy,
                receive_seconds=busy,
                **data_links(cluster, stride=stride, replicas=of.replicas),
            )
        return found

    def predict(self, of: Configuration, program: Program | None = None) -> StepPrediction:
        """Simulate a step.

        Raises:
            InputError, ScheduleError: sizes that do not fit.
        """
        self.check(of)
        program = program or self.program(of)
        if program.schedule.num_stages != of.stages:
            raise InputError(
                f"chunks={of.chunks}: schedule {program.name!r} has {program.schedule.num_stages} stages on "
                f"{of.pipeline} ranks. Use {program.placement.num_chunks}."
            )
        timeline = self.timeline(of, program)
        update = self.update_seconds(of, program.placement.stages_of)
        seconds = timeline.makespan + self.shared_sum_seconds(of, program.placement) + update
        return StepPrediction(step_seconds=seconds, update_seconds=update, timeline=timeline)

    def shared_sum_seconds(self, of: Configuration, placement: Placement) -> float:
        """With the exchange of a tied table's gradients between the ranks with the first and the last stage."""
        seconds = super().shared_sum_seconds(of, placement)
        cluster = self.cluster.beside(of.devices)
        if not self.model.tie_embeddings or placement.replicas[0] == placement.replicas[-1]:
            return seconds
        size = NumberBytes.of(of.precision).gradient * self._bytes.tied(of)
        if cluster.measured is None:
            return seconds + exchanged_seconds([size], self.network(of))
        both = max(1.0, 2 * of.devices / of.pipeline / cluster.measured.cores)
        sums = KernelTimes(cluster, of.element).elementwise(3 * size, 1)
        return seconds + self.corrections.factor(of) * both * (exchange_seconds(cluster, size) + sums)

    def crowding(self, of: Configuration) -> float:
        """That of the model's own layers where it is measured."""
        known = None if self.measured is None else self.measured.crowding
        return super().crowding(of) if known is None else known

    def parameters(self, of: Configuration) -> list[float]:
        """Elements of the parameters of every stage on one process."""
        return self._bytes.parameters(of)

    def held_parameters(self, of: Configuration, stages: Sequence[int]) -> float:
        """Elements of the parameters of a process with these stages; a shared one counts once."""
        return self._bytes.held(of, self.parameters(of), stages)

    def kept_bytes(self, of: Configuration) -> list[float]:
        """Bytes that F of one micro-batch keeps on every stage; of slices, in which keys and values are kept too."""
        return self._bytes.kept(of)

    def update_seconds(self, of: Configuration, stages_of: Sequence[Sequence[int]]) -> float:
        """Seconds of the optimizer's update on the rank with most parameters."""
        sizes = self.parameters(of)
        held = max(self._bytes.held(of, sizes, stages) for stages in stages_of)
        shards = of.replicas if of.strategy.shards_optimizer else 1
        cluster = self.cluster.beside(of.devices)
        if cluster.measured is None or cluster.rates is None:
            seconds = self.times(of, Recompute.NONE).update_seconds(held / shards, OPTIMIZERS[of.optimizer])
            return self.with_states(of, seconds, held / shards)
        turns = max(1.0, of.devices / cluster.measured.cores)
        known = self.measured or LayerTimes(element=of.element, step_seconds=cluster.rates.second("step"))
        update = known.update * cluster.rates.curve("update", held / shards)
        seconds = turns * (update + known.step_seconds) + step_end_seconds(cluster, replicas=of.replicas)
        return self.corrections.factor(of) * seconds

    def peak_bytes(self, of: Configuration, program: Program | None = None) -> list[float]:
        """Peak memory of every rank."""
        return [rank.peak for rank in memory_of_ranks(program or self.program(of), self.memory_model(of))]


_NOTHING = Seconds(0.0, 0.0, 0.0)
