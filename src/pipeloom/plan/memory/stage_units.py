"""Units of the parameters of stages, and their bytes, computed once for stages of the same form. No torch here."""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from pipeloom.ir import DataAxis, Granularity, Op, Placement, Program
from pipeloom.ir.unit_actions import gathers_inside, unit_actions
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse, group_parameters, units_by_layer
from pipeloom.parallel.data.unit_layout import expert_axis
from pipeloom.plan.memory.memory_model import LayerMemory, MemoryModel
from pipeloom.plan.memory.stage_moments import StageGradients, StageMoments, stage_moments
from pipeloom.plan.memory.state_bytes import NumberBytes, UnitBytes, unit_bytes

_EXPERTS = "experts"  # the kind of a unit of parameters that expert-parallel processes divide
Units = dict[int, list[ParameterUse]]  # by the position of the first parameter


@dataclass(frozen=True, kw_only=True)
class StageUnits:
    """The units of a stage, in the order of its parameters.

    Attributes:
        units: bytes of each on one replica.
        replicas: number of replicas that share each.
        layers: the units that each layer reads.
        gradients: of its layers.
        data: the data axis.
        offloads: whether shards are offloaded.
    """

    units: Sequence[UnitBytes]
    replicas: Sequence[int]
    layers: tuple[tuple[int, ...], ...]
    gradients: StageGradients
    data: DataAxis | None
    offloads: bool

    def full_gradients(self, *, fine: bool) -> float:
        """Bytes of full gradients in a backward: of all units, or where each is reduced at once, of a layer's."""
        sizes = [unit.full_gradients for unit in self.units]
        if not fine:
            return sum(sizes)
        return max([*sizes, *(sum(sizes[unit] for unit in layer) for layer in self.layers)], default=0.0)

    @cached_property
    def gathered(self) -> tuple[float, float, float]:
        """Bytes of full parameters: at the UNSHARD, at most in the first computation, and from then on.

        The shards of offloaded units are read before they are gathered, and count until then.
        """
        data, sizes, replicas = self.data, [unit.gathered for unit in self.units], self.replicas
        assert data is not None
        offloaded = [unit for unit, degree in enumerate(replicas) if self.offloads and degree > 1]
        begun, most = 0.0, 0.0
        for forward in (True, False) if gathers_inside(data) else (True,):
            actions = unit_actions(self.layers, len(sizes), data, forward=forward, offloaded=offloaded)
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


class ModelUnits:
    """The units of the stages of a model.

    Args:
        placement: of the stages.
        data: the data axis.
        model: the layers, and how they are trained.
        replica: number of the replica.
        known: what earlier models have, which is used again for stages of the same form.

    Attributes:
        homes: by the name of a parameter, all stages that have it.
    """

    def __init__(
        self,
        placement: Placement,
        data: DataAxis | None,
        model: MemoryModel,
        replica: int = 0,
        known: dict[Hashable, StageUnits] | None = None,
    ) -> None:
        self._placement, self._data, self._model, self._replica = placement, data, model, replica
        self._formats = NumberBytes.of(model.precision)
        self._known: dict[Hashable, StageUnits] = {} if known is None else known
        self._moments: dict[Hashable, tuple[StageMoments, StageGradients]] = {}  # keys have their identity
        self.homes: dict[str, tuple[int, ...]] = {}
        for stage, layers in enumerate(model.stages):
            for name in dict.fromkeys(chain.from_iterable(layer.parameters for layer in layers)):
                self.homes[name] = (*self.homes[name], stage) if name in self.homes else (stage,)
        granularity = data.granularity if data else Granularity.STEP
        self._rule = BucketRule.of(granularity, model.bucket_bytes, whole_parameters=model.whole_parameters)
        self._fine = data is not None and data.degree > 1 and granularity is Granularity.MICROBATCH
        trained = model.precision, model.optimizer, model.whole_parameters, model.elsewhere, model.bucket_bytes
        self._settings = self._data, trained, model.expert, replica

    def gradient_bytes(self, stage: int) -> dict[str, float]:
        """By the name of a parameter of a stage, bytes of its gradient behind reductions over replicas."""
        shards = self._data.degree if self._data is not None and self._data.strategy.shards_optimizer else 1
        layers = self._model.stages[stage]
        sizes = {name: size for layer in layers for name, size in layer.parameter_sizes.items()}
        return {name: self._formats.gradient * size / shards for name, size in sizes.items()}

    def parts_of_rank(self, rank: int) -> Iterator[tuple[int, Units]]:
        """For each stage of a rank its units, as a run forms them.

        Parameters that several of its stages share belong to the first of them.
        """
        seen: set[str] = set()
        for stage in self._placement.stages_of[rank]:
            yield stage, self._parts(stage, seen)

    def of_rank(self, rank: int) -> dict[int, StageUnits]:
        """For each stage of a rank, its units."""
        seen: set[str] = set()
        found = {}
        for stage in self._placement.stages_of[rank]:
            form = self._form(stage, seen)
            units = self._known.get(form)
            if units is None:
                units = self._known[form] = self._of_stage(self._model.stages[stage], self._parts(stage, seen))
            seen.update(chain.from_iterable(layer.parameters for layer in self._model.stages[stage]))
            found[stage] = units
        return found

    def moments(self, stage: int, index: int, slices: int, gradients: StageGradients) -> StageMoments:
        """`stage_moments` of a stage, computed once for stages whose layers have the same bytes."""
        layers = [
            (id(of.kept_bytes), id(of.backward), id(of.slices), of.forward_bytes, of.deferred_bytes)
            for of in self._model.stages[stage]
        ]
        recompute = self._model.recompute_of(stage)
        key = tuple(layers), recompute, index, slices, id(gradients)
        if key not in self._moments:
            self._moments[key] = stage_moments(self._model, stage, recompute, index, slices, gradients), gradients
        return self._moments[key][0]

    def _form(self, stage: int, seen: Container[str]) -> Hashable:
        """All that the units of a stage depend on, where earlier stages of its rank have the parameters in `seen`."""
        layers = self._model.stages[stage]
        names = list(chain.from_iterable(layer.parameters for layer in layers))
        homes = map(self.homes.__getitem__, names)
        shared = [(at, names[at], of, names[at] in seen) for at, of in enumerate(homes) if len(of) > 1]
        several = tuple(names) if len(set(names)) < len(names) else ()  # layers of the stage share some
        return self._settings, tuple(layer.form for layer in layers), tuple(shared), several

    def _parts(self, stage: int, seen: set[str]) -> Units:
        layers, readers = self._model.stages[stage], dict[str, list[int]]()
        for index, layer in enumerate(layers):
            for name in layer.parameters:
                if name not in seen:
                    readers.setdefault(name, []).append(index)
        seen.update(readers)
        parameters = [
            ParameterUse(
                name,
                self._formats.compute * layers[at[0]].parameter_sizes[name],
                tuple(at),
                self.homes[name],
                kind=_EXPERTS if self._model.expert > 1 and name in layers[at[0]].expert_parameters else None,
            )
            for name, at in readers.items()
        ]
        units = group_parameters(parameters, self._rule)
        return {min(unit): [parameters[position] for position in unit] for unit in units}

    def _of_stage(self, layers: Sequence[LayerMemory], parts: Units) -> StageUnits:
        data, model, replica = self._data, self._model, self._replica
        degree, made = data.degree if data else 1, dict[int, UnitBytes]()
        loads = [0] * degree
        of_experts, offloads = [0] * (degree // model.expert), "masters" in model.elsewhere
        for first, uses in parts.items():
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
        ordered = [parts[first] for first in sorted(made)]
        found = StageUnits(
            units=[made[first] for first in sorted(made)],
            replicas=[degree // model.expert if uses[0].kind == _EXPERTS else degree for uses in ordered],
            layers=units_by_layer(ordered, len(layers)),
            gradients=self._gradients(len(layers), parts.values()),
            data=data,
            offloads=offloads,
        )
        found = replace(found, gradients=found.gradients._replace(reducing=self._reducing(found, ordered, len(layers))))
        if not self._fine:
            return found
        return replace(found, gradients=found.gradients._replace(fixed=found.full_gradients(fine=True)))

    def _gradients(self, num_layers: int, parts: Iterable[Sequence[ParameterUse]]) -> StageGradients:
        made, shared = [0.0] * num_layers, [0.0] * num_layers
        for use in chain.from_iterable(parts):
            elements = use.num_bytes / self._formats.compute
            first, last = min(use.layers), max(use.layers)
            made[first] += self._formats.gradient * elements
            for at in range(first, last):
                shared[at] += self._formats.compute * elements * (2 if at == first else 1)
        return StageGradients(made, shared, None, [0.0] * num_layers)

    def _reducing(self, found: StageUnits, uses: Sequence[Sequence[ParameterUse]], num_layers: int) -> Sequence[float]:
        """See `StageGradients`. Units are reduced from the last on, each when the one before has been."""
        data = found.data
        if data is None or not data.strategy.shards_optimizer or self._fine:
            return [0.0] * num_layers
        sizes = list(zip(found.units, found.replicas, uses, strict=True))
        by_layer, summed = [0.0] * num_layers, 0.0
        before = freed = 0.0  # by the unit in flight, once it is reduced, and by those before
        for layer in reversed(range(num_layers)):
            by_layer[layer] = summed - freed
            while sizes and min(min(use.layers) for use in sizes[-1][2]) >= layer:
                unit, degree, _ = sizes.pop()
                if degree == 1:
                    continue
                freed += before
                change = unit.full_gradients - unit.reduced
                if sends_parts(data, self._model):  # the sum takes the place of what stays
                    freed += change
                else:
                    summed, before = unit.sending / degree, change
        return by_layer


def sends_parts(data: DataAxis | None, model: MemoryModel) -> bool:
    """Whether replicas, of one host, copy sharded gradients into messages, without flat gradients."""
    if data is None or data.degree == 1 or model.device == "cuda":
        return False
    return data.strategy.shards_optimizer and not data.strategy.has_server


def units_of_rank(program: Program, model: MemoryModel, rank: int) -> dict[int, Units]:
    """For each stage of a rank its units, as a run forms them: the position of the first parameter, and the parameters.

    Parameters that several of its stages share belong to the first of them.
    """
    return dict(ModelUnits(program.placement, program.data, model).parts_of_rank(rank))
