"""Bytes of a rank at each of its moments, beside the activations that are live. No torch here.

Model states, gradients of other stages and gathered parameters are there. Inside the computation, activations go and
gradients come, see `pipeloom.plan.memory.stage_moments`: these bytes are those of `pipeloom.plan.memory.rank_memory`,
which predicts all moments of a step. Where a reduction may have run before, they are the least of both cases.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from pipeloom.ir import Op
from pipeloom.ir.data_axis import DataAxis, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.memory_model import MemoryModel
from pipeloom.plan.memory.stage_moments import StageMoments, stage_moments
from pipeloom.plan.memory.stage_units import ModelUnits, StageUnits
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.data_ways import state_bytes_per_parameter
from pipeloom.plan.search.memory.live_moments import Moment, Moments
from pipeloom.plan.search.shapes import Shape

Inside = Sequence[float]  # bytes inside computations of a stage, by `code`
_OPS = {op: 4 * number for number, op in enumerate((Op.F, Op.I, Op.B, Op.W))}


def code(moment: Moment) -> int:
    """The place of a moment in `Inside`: by operation, whether it adds to gradients, and whether it is the last."""
    return _OPS[moment.op] + 2 * (moment.stage in moment.summing) + moment.ends


class StageBytes:
    """Bytes of one stage under one data strategy.

    Args:
        model: the layers of all stages.
        stage: which of them.
        units: of its parameters.
        slices: per micro-batch.
        known: moments of the same layers under other data strategies.
        alone: whether its ranks have no other stage: at granularity chunk, all its computations are one run.

    Attributes:
        full: bytes of its gradients.
        reduced: bytes of its gradients behind a reduction.
        buffers: bytes of its buffers.
        gathered: bytes of parameters that are gathered while it computes.
        coming: bytes of those that are gathered before.
    """

    def __init__(
        self,
        model: MemoryModel,
        stage: int,
        units: StageUnits,
        slices: int,
        known: dict[Hashable, list[StageMoments]],
        *,
        alone: bool,
    ) -> None:
        self._model, self._stage, self._units, self._slices = model, stage, units, slices
        self._known = known
        self._inside: dict[Recompute, Inside] = {}
        self._waiting: dict[Recompute, float] = {}
        data = units.data
        granularity = data.granularity if data is not None and data.degree > 1 else Granularity.STEP
        self._granularity = Granularity.STEP if alone and granularity is Granularity.CHUNK else granularity
        self.full = units.full_gradients(fine=self._granularity is Granularity.MICROBATCH)
        self.reduced = sum(unit.reduced for unit in units.units)
        self.buffers = NumberBytes.of(model.precision).compute * sum(e.buffer_elements for e in model.stages[stage])
        self.coming, most, then = units.gathered if data is not None else (0.0, 0.0, 0.0)
        self.gathered = min(most, then)

    def inside(self, kind: Recompute) -> Inside:
        """With a kind of recomputation."""
        if kind not in self._inside:
            both = self._of_slices(kind)
            self._waiting[kind] = min(each.waiting for each in both)
            insides = list(map(self._of_slice, both))
            self._inside[kind] = insides[0] if len(insides) == 1 else list(map(min, *insides))
        return self._inside[kind]

    def _of_slices(self, kind: Recompute) -> list[StageMoments]:
        """The moments of the first and of the last slice."""
        gradients = self._units.gradients
        key = kind, gradients.fixed, tuple(gradients.made), tuple(gradients.shared), tuple(gradients.reducing)
        if key not in self._known:
            model = replace(self._model, recompute=(kind,) * len(self._model.stages))
            self._known[key] = [
                stage_moments(model, self._stage, index, self._slices, gradients) for index in {0, self._slices - 1}
            ]
        return self._known[key]

    def waiting(self, kind: Recompute) -> float:
        """Bytes that I leaves for W."""
        self.inside(kind)
        return self._waiting[kind]

    def _of_slice(self, each: StageMoments) -> Inside:
        fine, coarse = (self._granularity is kind for kind in (Granularity.MICROBATCH, Granularity.STEP))
        there = self.full if coarse else self.reduced
        forward, inputs = each.forward + self.gathered, each.inputs + self.gathered
        first, adding = each.first, each.later + (there if fine else 0.0)
        of_last = min(each.first, each.first_reducing), min(adding, each.later_reducing)
        weights, more_weights = each.first_weights, each.later_weights + (there if fine else 0.0)
        if (
            self._granularity is Granularity.CHUNK
        ):  # reduced after each run of micro-batches, the gradients of the next one are new
            first, adding = of_last[0], min(of_last[0] + there, of_last[1])
            of_last = first, adding
            more_weights = min(weights + there, more_weights)
        backwards = (first, of_last[0], adding, of_last[1])
        return [
            *(forward, forward, forward + there, forward + there),
            *(inputs, inputs, inputs + there, inputs + there),
            *(self.gathered + each for each in backwards),
            *(weights, weights, more_weights, more_weights),
        ]


@dataclass
class KnownBytes:
    """What shapes of a model on a cluster share.

    Attributes:
        units: of stages, by their form.
        stages: with a data strategy.
        moments: of stages, by their gradients.
    """

    units: dict[Hashable, StageUnits] = field(default_factory=dict)
    stages: dict[Hashable, dict[Hashable, StageBytes]] = field(default_factory=dict)
    moments: dict[Hashable, dict[Hashable, list[StageMoments]]] = field(default_factory=dict)


class Beside:
    """Bytes of a shape with a data strategy, beside live activations.

    Args:
        moments: of each rank.
        codes: the `code` of each.
        sizes: of each rank at its moments, without what is inside of the computation.
        stages: what is inside of each.
    """

    def __init__(
        self,
        moments: Moments,
        codes: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[float]],
        stages: Sequence[StageBytes],
    ) -> None:
        self._moments, self._codes, self._sizes, self.stages = moments, codes, sizes, stages
        self._of_recompute: dict[tuple[Recompute, ...], list[list[float]]] = {}

    def at(self, rank: int, number: int, recompute: Sequence[Recompute]) -> float:
        """Bytes of a rank at a moment, where every stage has a kind of recomputation."""
        stage = self._moments[rank][number].stage
        return self._sizes[rank][number] + self.stages[stage].inside(recompute[stage])[self._codes[rank][number]]

    def of(self, recompute: tuple[Recompute, ...]) -> list[list[float]]:
        """`at`, of each rank at its moments."""
        if recompute not in self._of_recompute:
            insides = [stage.inside(kind) for stage, kind in zip(self.stages, recompute, strict=True)]
            self._of_recompute[recompute] = [
                [size + insides[moment.stage][code] for size, moment, code in zip(*of_rank, strict=True)]
                for of_rank in zip(self._sizes, self._moments, self._codes, strict=True)
            ]
        return self._of_recompute[recompute]

    def with_more(self, more: Sequence[float] | None) -> "Beside":
        """With more bytes on each rank."""
        if more is None:
            return self
        sizes = [[size + extra for size in sizes] for sizes, extra in zip(self._sizes, more, strict=True)]
        return Beside(self._moments, self._codes, sizes, self.stages)


class MomentBytes:
    """The bytes of a shape, by data strategy.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        moments: of its ranks.
        known: of other shapes.
    """

    def __init__(self, costs: StepCosts, shape: Shape, moments: Moments, known: KnownBytes) -> None:
        self._costs, self._shape, self._moments, self._known = costs, shape, moments, known
        of, parameters = shape.of, costs.parameters(shape.of)
        cuts = pairwise(accumulate(of.blocks_of(costs.num_blocks), initial=0))
        ends = [costs.same_blocks(*each) for each in cuts]
        self._keys: list[Hashable] = [(each, stage == 0) for stage, each in enumerate(ends)]
        self._keys[-1] = self._keys[-1], "last"
        self._alone = [True] * len(ends)
        for held in shape.placement.stages_of:
            for stage in held if len(held) > 1 else ():
                self._alone[stage] = False
            if len(held) > 1 and costs.held_parameters(of, held) < sum(parameters[stage] for stage in held):
                before = 0.0
                for number, stage in enumerate(held):  # those that share some with earlier ones
                    total = costs.held_parameters(of, held[: number + 1])
                    if total - before < parameters[stage]:
                        self._keys[stage] = self._keys[stage], tuple(ends[each] for each in held[:number])
                    before = total
        same = of.inside, of.microbatch_size, of.precision, of.imbalance, of.slices, of.optimizer
        self._same, self._of_same = same, known.stages.setdefault(same, {})
        self._codes = [list(map(code, each)) for each in moments]
        self._found: dict[Hashable, Beside] = {}

    def of(self, of: Configuration) -> Beside:
        """With the data strategy of a configuration."""
        key = data, _ = of.data_axis(), of.offload_states
        if key not in self._found:
            stages = self._stages(of, data)
            self._found[key] = Beside(self._moments, self._codes, self._sizes(of, data, stages), stages)
        return self._found[key]

    def _stages(self, of: Configuration, data: DataAxis) -> list[StageBytes]:
        known = self._of_same
        keys = [(key, alone, data, of.offload_states) for key, alone in zip(self._keys, self._alone, strict=True)]
        if not all(key in known for key in keys):
            model, placement = self._costs.memory_model(of), self._shape.placement
            units = ModelUnits(placement, data, model, known=self._known.units)
            for rank in range(placement.num_ranks):
                for stage, each in units.of_rank(rank).items():
                    if keys[stage] not in known:
                        moments = self._known.moments.setdefault((self._same, self._keys[stage]), {})
                        alone = self._alone[stage]
                        known[keys[stage]] = StageBytes(model, stage, each, of.slices, moments, alone=alone)
        return [known[key] for key in keys]

    def _sizes(self, of: Configuration, data: DataAxis, stages: Sequence[StageBytes]) -> list[list[float]]:
        once = data.degree == 1 or data.granularity is Granularity.STEP
        ahead = data.strategy.shards_parameters and data.granularity is Granularity.CHUNK
        each = state_bytes_per_parameter(of)
        found: list[list[float]] = []
        for held, moments in zip(self._shape.placement.stages_of, self._moments, strict=True):
            always = each * self._costs.held_parameters(of, held) + sum(stages[stage].buffers for stage in held)
            coarse = once or len(held) == 1  # all computations of a rank are one run
            sizes: list[float] = []
            for moment in moments:
                others = moment.summing - {moment.stage}
                size = always + sum(stages[s].full if coarse else stages[s].reduced for s in others)
                if coarse and data.strategy.shards_parameters:
                    there = {stage for stage, count in moment.live.items() if count} | others
                    size += sum(stages[stage].gathered for stage in there - {moment.stage})
                elif ahead and moment.following is not None:
                    size += stages[moment.following].coming
                sizes.append(size)
            found.append(sizes)
        return found
