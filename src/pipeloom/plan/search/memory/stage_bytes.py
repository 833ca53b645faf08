"""Bytes of stages: what computations hold inside, by data strategy, and the least that shapes need. No torch here.

Inside a computation, activations go and gradients come, see `pipeloom.plan.memory.stage_moments`: these bytes are those
of `pipeloom.plan.memory.rank_memory`, which predicts all moments of a step. Where a reduction may have run before, they
are the least of both cases.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import copysign, inf

from pipeloom.ir import Op
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.memory_model import MemoryModel
from pipeloom.plan.memory.stage_moments import StageGradients, StageMoments, stage_moments
from pipeloom.plan.memory.stage_units import ModelUnits, StageUnits
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.memory.live_moments import Moment
from pipeloom.plan.search.space.shapes import Shape
from pipeloom.plan.search.space.ways import state_bytes_per_parameter

Inside = Sequence[float]  # bytes inside computations of a stage, by `code`
_OPS = {op: 4 * number for number, op in enumerate((Op.F, Op.I, Op.B, Op.W))}

_FORWARD = (_OPS[Op.F],)
_FIRST = tuple(_OPS[op] + ends for op in (Op.I, Op.B) for ends in (0, 1))
# All I may come before the first W.
_ADDING = tuple(_OPS[op] + 2 + ends for op in (Op.I, Op.B, Op.W) for ends in (0, 1))


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
        always: bytes of its model states and buffers.
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
        self._computing: dict[Hashable, float] = {}
        data = units.data
        granularity = data.granularity if data is not None and data.degree > 1 else Granularity.STEP
        self._granularity = Granularity.STEP if alone and granularity is Granularity.CHUNK else granularity
        self.full = units.full_gradients(fine=self._granularity is Granularity.MICROBATCH)
        self.reduced = sum(unit.reduced for unit in units.units)
        states = [kind for kind in ("parameters", "masters", "optimizer") if kind not in model.elsewhere]
        buffers = NumberBytes.of(model.precision).compute * sum(e.buffer_elements for e in model.stages[stage])
        self.always: float = buffers + sum(getattr(unit, kind) for unit in units.units for kind in states)
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

    def kept(self, kind: Recompute) -> float:
        """Bytes that F of one slice keeps, at least."""
        return sum(layer.kept_bytes[kind] for layer in self._model.stages[self._stage]) / self._slices

    def computing(self, kinds: Sequence[Recompute], codes: Sequence[int]) -> float:
        """Bytes of an activation and inside of a computation, at least, with these kinds and codes."""
        key = kinds, codes
        if key not in self._computing:
            self._computing[key] = min(
                self.kept(kind) + min(map(self.inside(kind).__getitem__, codes)) for kind in kinds
            )
        return self._computing[key]

    def _of_slices(self, kind: Recompute) -> list[StageMoments]:
        """The moments of the first and of the last slice."""
        gradients = self._units.gradients
        key = kind, gradients.fixed, tuple(gradients.made), tuple(gradients.shared), tuple(gradients.reducing)
        if key not in self._known:
            self._known[key] = [
                stage_moments(self._model, self._stage, kind, index, self._slices, gradients)
                for index in {0, self._slices - 1}
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
        # Reduced after each run of micro-batches, the gradients of the next one are new.
        if self._granularity is Granularity.CHUNK:
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
        stages: with a data strategy, by all else that they depend on.
        moments: of stages, by their gradients.
        numbers: of what the bytes of a stage depend on.
        shapes: stages of shapes, whatever their schedules.
        heads: elements of what follows the last block, and its bytes with any data strategy, at least.
        plain: bytes of stages with any data strategy, at least.
    """

    units: dict[Hashable, StageUnits] = field(default_factory=dict)
    stages: dict[Hashable, StageBytes] = field(default_factory=dict)
    moments: dict[Hashable, dict[Hashable, list[StageMoments]]] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    shapes: dict[Hashable, "ShapeStages"] = field(default_factory=dict)
    heads: dict[Hashable, tuple[float, float]] = field(default_factory=dict)
    plain: dict[Hashable, float] = field(default_factory=dict)

    def of(self, costs: StepCosts, shape: Shape) -> "ShapeStages":
        """The stages of a shape."""
        of = shape.of
        same = _same(of)
        key = same, of.microbatches, shape.placement, of.blocks
        if key not in self.shapes:
            self.shapes[key] = ShapeStages(costs, shape, self, same)
        return self.shapes[key]

    def of_head(self, costs: StepCosts, of: Configuration, kinds: Sequence[Recompute], slices: int) -> float:
        """Bytes of a rank with all that follows the last block, at least.

        Args:
            costs: of the model on its cluster.
            of: a configuration with a data strategy.
            kinds: of recomputation.
            slices: most of a micro-batch.
        """
        parameters, plain = self._head(costs, of, kinds, slices)
        return state_bytes_per_parameter(of) * parameters + plain

    def most_states(
        self, costs: StepCosts, of: Configuration, kinds: Sequence[Recompute], slices: int, most: float
    ) -> float:
        """Bytes of model states per parameter, at most, beside which a rank can compute what follows the last block."""
        parameters, plain = self._head(costs, of, kinds, slices)
        return _each(most - plain, parameters)

    def _head(
        self, costs: StepCosts, of: Configuration, kinds: Sequence[Recompute], slices: int
    ) -> tuple[float, float]:
        key = _same(of), kinds, slices
        if key not in self.heads:
            apart = of._replace(pipeline=2, chunks=1, slices=slices, blocks=(costs.num_blocks, 0))
            plain = _plain(costs.memory_model(apart), 1, slices, kinds)
            self.heads[key] = costs.parameters(apart)[-1], plain
        return self.heads[key]


def _plain(model: MemoryModel, stage: int, slices: int, kinds: Sequence[Recompute]) -> float:
    """Bytes of buffers, what F keeps, and what is inside of it, or of B or I beside gradients, at least."""
    layers, found = model.stages[stage], inf
    nothing = [0.0] * len(layers)
    gradients = StageGradients(nothing, nothing, None, nothing)
    for kind in kinds:
        each = stage_moments(model, stage, kind, 0, slices, gradients)
        kept = sum(layer.kept_bytes[kind] for layer in layers) / slices
        found = min(found, min(kept, each.kept) + max(each.forward, min(each.inputs, each.later)))
    return NumberBytes.of(model.precision).compute * sum(layer.buffer_elements for layer in layers) + found


def _each(room: float, parameters: float) -> float:
    """Bytes per parameter; without any, all states fit where the rest does."""
    return room / parameters if parameters else copysign(inf, room)


def _same(of: Configuration) -> Hashable:
    """What the bytes of layers depend on."""
    return of.inside, of.microbatch_size, of.precision, of.imbalance, of.slices, of.optimizer


class ShapeStages:
    """The stages of shapes with the same placement and blocks.

    Args:
        costs: of the model on its cluster.
        shape: one of them.
        known: of other shapes.
        same: what bytes of its layers depend on.
    """

    def __init__(self, costs: StepCosts, shape: Shape, known: KnownBytes, same: Hashable) -> None:
        self._costs, self._placement, self._known = costs, shape.placement, known
        self._both_ways = shape.placement.is_replicated
        cuts = pairwise(accumulate(shape.of.blocks_of(costs.num_blocks), initial=0))
        ends = [costs.same_blocks(*each) for each in cuts]
        keys: list[Hashable] = [(same, each, stage == 0) for stage, each in enumerate(ends)]
        keys[-1] = keys[-1], "last"
        self._alone = [True] * len(ends)
        parameters = costs.parameters(shape.of)
        self.parameters = [costs.held_parameters(shape.of, held) for held in shape.placement.stages_of]
        for held, total in zip(shape.placement.stages_of, self.parameters, strict=True):
            for stage in held if len(held) > 1 else ():
                self._alone[stage] = False
            if total < sum(parameters[stage] for stage in held):
                before = 0.0
                for number, stage in enumerate(held):  # those that share some with earlier ones
                    now = costs.held_parameters(shape.of, held[: number + 1])
                    if now - before < parameters[stage]:
                        keys[stage] = keys[stage], tuple(ends[each] for each in held[:number])
                    before = now
        self._keys = [known.numbers.setdefault(key, len(known.numbers)) for key in keys]
        # The rank with the head first, which most often has too little memory.
        head = shape.placement.replicas[-1][0]
        self._ranks = sorted(range(shape.placement.num_ranks), key=lambda rank: rank != head)
        self._models: dict[Hashable, tuple[MemoryModel, ModelUnits]] = {}
        self._of_ranks: dict[Hashable, dict[int, StageBytes]] = {}
        self._found: dict[Hashable, list[StageBytes]] = {}
        self._fits: dict[Hashable, bool] = {}
        self._most_states: dict[Hashable, float] = {}

    def of(self, of: Configuration) -> list[StageBytes]:
        """With the data strategy of a configuration."""
        key = of.data_axis(), of.offload_states
        if key not in self._found:
            stages: dict[int, StageBytes] = {}
            for rank in self._ranks:
                stages |= self._of_rank(of, rank)
            self._found[key] = [stages[stage] for stage in range(len(stages))]
        return self._found[key]

    def _of_rank(self, of: Configuration, rank: int) -> dict[int, StageBytes]:
        """Its stages, with the data strategy of a configuration."""
        strategy = of.data_axis(), of.offload_states
        if (strategy, rank) not in self._of_ranks:
            known, held = self._known.stages, self._placement.stages_of[rank]
            keys = {stage: (self._keys[stage], self._alone[stage], strategy) for stage in held}
            if not all(key in known for key in keys.values()):
                if strategy not in self._models:
                    model = self._costs.memory_model(of)
                    units = ModelUnits(self._placement, strategy[0], model, known=self._known.units)
                    self._models[strategy] = model, units
                model, units = self._models[strategy]
                for stage, each in units.of_rank(rank).items():
                    if keys[stage] not in known:
                        moments = self._known.moments.setdefault(self._keys[stage], {})
                        alone = self._alone[stage]
                        known[keys[stage]] = StageBytes(model, stage, each, of.slices, moments, alone=alone)
            self._of_ranks[strategy, rank] = {stage: known[key] for stage, key in keys.items()}
        return self._of_ranks[strategy, rank]

    def always(self, of: Configuration, rank: int) -> float:
        """Bytes of a rank that are there all the time, with the data strategy of a configuration."""
        return sum(stage.always for stage in self._of_rank(of, rank).values())

    def most_states(self, of: Configuration, kinds: Sequence[Recompute], most: float) -> float:
        """Bytes of model states per parameter, at most, beside which every rank can compute each of its stages."""
        key = kinds, most
        if key not in self._most_states:
            pairs = zip(self._plain(of, kinds).values(), map(self.parameters.__getitem__, self._ranks), strict=True)
            self._most_states[key] = min(_each(most - size, parameters) for size, parameters in pairs)
        return self._most_states[key]

    def may_fit(self, of: Configuration, kinds: Sequence[Recompute], most: float, *, offloads: bool) -> bool:
        """Whether every rank may have enough memory, with some schedule.

        A rank computes each of its stages, and begins the backwards of the last one with an activation of each.

        Args:
            of: a configuration of these shapes, with a data strategy.
            kinds: of recomputation that stages may have.
            most: bytes of a device.
            offloads: whether activations may be elsewhere.
        """
        key = of.data_axis(), of.offload_states, kinds, most, offloads
        if key not in self._fits:
            ranks = (self._least(of, kinds, rank, offloads=offloads) for rank in self._ranks)
            self._fits[key] = all(size <= most for size in ranks)
        return self._fits[key]

    def _plain(self, of: Configuration, kinds: Sequence[Recompute]) -> dict[int, float]:
        """Bytes of each rank without states with any data strategy, at least, of its stage that needs most."""
        known, model = self._known.plain, self._costs.memory_model(of)
        for stage, key in enumerate(self._keys):
            if (key, kinds) not in known:
                known[key, kinds] = _plain(model, stage, of.slices, kinds)
        of_stages = [known[key, kinds] for key in self._keys]
        return {rank: max(of_stages[stage] for stage in self._placement.stages_of[rank]) for rank in self._ranks}

    def _least(self, of: Configuration, kinds: Sequence[Recompute], rank: int, *, offloads: bool) -> float:
        """Bytes of a rank with any schedule, at least."""
        stages, held = self._of_rank(of, rank), self._placement.stages_of[rank]
        rest = 0.0  # of other stages, when the backward of the last one begins
        if len(held) > 1 and not offloads and not self._both_ways:
            rest = sum(min(map(stages[stage].kept, kinds)) for stage in held[:-1])
        several = of.microbatches > 1 and not self._both_ways
        last = stages[held[-1]]
        most = last.computing(kinds, _FIRST) + rest
        if held[-1] == len(self._keys) - 1:  # its forward has the logits
            most = max(most, last.computing(kinds, _FORWARD) + rest)
        most = max(most, *(stage.computing(kinds, _ADDING if several else _FIRST) for stage in stages.values()))
        return sum(stage.always for stage in stages.values()) + most
