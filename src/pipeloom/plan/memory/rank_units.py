"""What a rank has of its stages: units of parameters, states, gradients; bytes of computations. No torch here."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain, product

from pipeloom.ir import Granularity, Op, Program
from pipeloom.ir.unit_actions import gathers_inside, unit_actions
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse, group_parameters, units_by_layer
from pipeloom.parallel.data.unit_layout import expert_axis
from pipeloom.plan.memory.memory_model import MemoryModel, num_parameters
from pipeloom.plan.memory.stage_moments import StageGradients, StageMoments, stage_moments
from pipeloom.plan.memory.state_bytes import NumberBytes, UnitBytes, unit_bytes

_EXPERTS = "experts"  # the kind of a unit of parameters that expert-parallel processes divide


def units_of_rank(program: Program, model: MemoryModel, rank: int) -> dict[int, dict[int, list[ParameterUse]]]:
    """For each stage of a rank its units, as a run forms them: the position of the first parameter, and the parameters.

    Parameters that several of its stages share belong to the first of them.
    """
    homes: dict[str, tuple[int, ...]] = {}
    for stage, layers in enumerate(model.stages):
        for name in dict.fromkeys(name for layer in layers for name in layer.parameters):
            homes[name] = (*homes.get(name, ()), stage)
    granularity = program.data.granularity if program.data else Granularity.STEP
    rule = BucketRule.of(granularity, model.bucket_bytes, whole_parameters=model.whole_parameters)
    number_bytes = NumberBytes.of(model.precision).compute
    seen: set[str] = set()
    found = {}
    for stage in program.placement.stages_of[rank]:
        layers, readers = model.stages[stage], dict[str, list[int]]()
        for index, layer in enumerate(layers):
            for name in layer.parameters:
                if name not in seen:
                    readers.setdefault(name, []).append(index)
        seen.update(readers)
        parameters = [
            ParameterUse(
                name,
                number_bytes * layers[at[0]].parameter_sizes[name],
                tuple(at),
                homes[name],
                kind=_EXPERTS if model.expert > 1 and name in layers[at[0]].expert_parameters else None,
            )
            for name, at in readers.items()
        ]
        units = group_parameters(parameters, rule)
        found[stage] = {min(unit): [parameters[position] for position in unit] for unit in units}
    return found


class RankUnits:
    """What one rank has of its stages, whatever the order of its computations.

    Args:
        program: with the placement, slices, skips and data axis.
        model: the layers, and how they are trained.
        rank: of the pipeline.
        replica: number of the replica.

    Attributes:
        stages: of the rank.
        reduces: whether gradients are summed over replicas.
    """

    def __init__(self, program: Program, model: MemoryModel, rank: int, replica: int) -> None:
        self._program, self._model = program, model
        self.stages = program.placement.stages_of[rank]
        self._formats = NumberBytes.of(model.precision)
        self._units: dict[int, list[UnitBytes]] = {}  # by stage; units that several stages share, on the first of them
        self._replicas: dict[int, list[int]] = {}  # by stage, the number of replicas that share each unit
        self._layers: dict[int, tuple[tuple[int, ...], ...]] = {}  # by stage, the units that each layer reads
        self._gradients: dict[int, StageGradients] = {}
        data = program.data
        self.reduces = data is not None and data.degree > 1
        self._fine_reductions = self.reduces and data is not None and data.granularity is Granularity.MICROBATCH
        for stage, units in units_of_rank(program, model, rank).items():
            layers, degree, made = model.stages[stage], data.degree if data else 1, {}
            loads = [0] * degree
            of_experts, offloads = [0] * (degree // model.expert), "masters" in model.elsewhere
            for first, uses in units.items():
                apart = uses[0].kind == _EXPERTS  # their replicas are every `expert`-th one
                of_unit = of_experts if apart else [0] * degree if len(uses[0].stages) > 1 else loads
                made[first] = unit_bytes(
                    {use.name: layers[use.layers[0]].parameters[use.name] for use in uses},
                    data=expert_axis(data, degree // model.expert, offloads=offloads) if apart and data else data,
                    formats=self._formats,
                    optimizer=model.optimizer,
                    in_blocks={use.name for use in uses if layers[use.layers[0]].is_block},
                    replica=replica // model.expert if apart else replica,
                    loads=of_unit if model.whole_parameters else None,
                )
            self._units[stage] = [made[first] for first in sorted(made)]
            kinds = [units[first][0].kind for first in sorted(made)]
            self._replicas[stage] = [degree // model.expert if kind == _EXPERTS else degree for kind in kinds]
            self._layers[stage] = units_by_layer([units[first] for first in sorted(made)], len(layers))
            self._gradients[stage] = self._stage_gradients(stage, units.values())

    def _stage_gradients(self, stage: int, units: Iterable[Sequence[ParameterUse]]) -> StageGradients:
        layers = self._model.stages[stage]
        made, shared = [0.0] * len(layers), [0.0] * len(layers)
        for use in chain.from_iterable(units):
            elements = use.num_bytes / self._formats.compute
            first, last = min(use.layers), max(use.layers)
            made[first] += self._formats.gradient * elements
            for at in range(first, last):
                shared[at] += self._formats.compute * elements * (2 if at == first else 1)
        return StageGradients(made, shared, self.full_gradients(stage) if self._fine_reductions else None)

    def always(self) -> dict[str, float]:
        """Bytes by kind that are there all the time, without versions of parameters."""
        units = [unit for units in self._units.values() for unit in units]
        kinds = ("parameters", "masters", "optimizer")
        held: dict[str, float] = {kind: sum(getattr(unit, kind) for unit in units) for kind in kinds}
        layers = [layer for stage in self.stages for layer in self._model.stages[stage]]
        return held | {"buffers": self._formats.compute * sum(layer.buffer_elements for layer in layers)}

    @property
    def num_parameters(self) -> int:
        """Elements of the rank's parameters, on all replicas together."""
        layers = [layer for stage in self.stages for layer in self._model.stages[stage]]
        return num_parameters(layers)

    @cached_property
    def slice_bytes(self) -> dict[int, tuple[float, float]]:
        """By stage, bytes of keys and values of a micro-batch in slices, and of their gradients."""
        slices = self._program.schedule.num_slices
        return {stage: self._model.slice_bytes(stage, slices) for stage in self.stages}

    def reduced(self, stage: int) -> float:
        """Bytes of a stage's gradients behind their reduction."""
        return sum(unit.reduced for unit in self._units[stage])

    def gradient_sums(self) -> float:
        """Bytes of gradients behind all reductions."""
        return sum(map(self.reduced, self.stages))

    def gathered(self, stage: int) -> tuple[float, float, float]:
        """Bytes of a stage's full parameters: at its UNSHARD, at most in the first computation, and from then on.

        The shards of offloaded units are read before they are gathered, and count until then.
        """
        data, sizes = self._program.data, [unit.gathered for unit in self._units[stage]]
        assert data is not None
        replicas, offloads = self._replicas[stage], "masters" in self._model.elsewhere
        offloaded = [unit for unit, degree in enumerate(replicas) if offloads and degree > 1]
        begun, most = 0.0, 0.0
        for forward in (True, False) if gathers_inside(data) else (True,):
            actions = unit_actions(self._layers[stage], len(sizes), data, forward=forward, offloaded=offloaded)
            inside = actions.at_layer if forward else actions.at_layer[::-1]
            there: set[int] = set()
            reading: set[int] = set()
            now = 0.0
            for number, part in enumerate((actions.unshard, *inside)):
                for op, unit in part:
                    if op is Op.RESHARD:
                        there.remove(unit)
                    elif op in (Op.UNSHARD, Op.RELOAD):
                        (there if op is Op.UNSHARD else reading).add(unit)
                        now = sum(sizes[u] for u in there) + sum(sizes[u] / replicas[u] for u in reading)
                        most = max(most, now)
                        reading -= there
                if number == 0:
                    begun = now
        return (most, most, most) if gathers_inside(data) else (begun, most, sum(sizes))

    def full_gradients(self, stage: int) -> float:
        """Bytes of full gradients in a backward: of all units, or where each is reduced at once, of a layer's."""
        sizes = [unit.full_gradients for unit in self._units[stage]]
        if not self._fine_reductions:
            return sum(sizes)
        return max([*sizes, *(sum(sizes[unit] for unit in layer) for layer in self._layers[stage])], default=0.0)

    def sending(self, stage: int, backwards: int) -> float:
        """Bytes of flat gradients while a stage is reduced, beside its full ones.

        Units are reduced one after another from the last on. Sharded ones are smaller from then on. In the first of
        `backwards`, the gradients of earlier units are not there yet.
        """
        units, data = self._units[stage], self._program.data
        missing = sum(unit.full_gradients for unit in units) if backwards == 1 and not self._fine_reductions else 0.0
        freed, most = 0.0, -missing
        for unit in reversed(units):
            missing = max(0.0, missing - unit.full_gradients)
            most = max(most, unit.sending - freed - missing)
            if data is not None and data.strategy.shards_optimizer and not self._fine_reductions:
                freed += unit.full_gradients - unit.reduced
        return most

    def skip_bytes(self, stage: int) -> float:
        """Bytes of the values that one F of a stage hands to stages behind the next ones, live until its backward.

        They are used before: the backward of the stage waits for the forwards of their users.
        """
        sizes = self._model.skip_bytes
        return sum(sizes.get((skip.source, skip.target), 0.0) for skip in self._program.skips_from.get(stage, ()))

    @cached_property
    def moments(self) -> dict[tuple[int, int], StageMoments]:
        """The memory of computations, by stage and slice."""
        slices = self._program.schedule.num_slices
        return {
            (stage, index): stage_moments(self._model, stage, index, slices, self._gradients[stage])
            for stage, index in product(self.stages, range(slices))
        }
