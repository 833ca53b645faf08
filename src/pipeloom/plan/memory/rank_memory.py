"""Peak memory of every rank of a program, by kind, in closed form: nothing is allocated and nothing measured.

A rank's program is walked once. Parameters, masters, optimizer states, buffers and the weight versions of a stream are
there all the time. Activations come with F and go with B or W, or are offloaded. Full gradients of a stage are there
from its first backward to the reduction that covers it, and gathered parameters from UNSHARD to RESHARD. At granularity
microbatch, units are gathered one ahead and reduced one by one (`pipeloom.ir.unit_actions`).

Not counted: messages in flight, the workspace of single operations, and torch's own memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product

from pipeloom.errors import InputError
from pipeloom.ir import Granularity, Op, Program
from pipeloom.ir.unit_actions import gathers_inside, unit_actions
from pipeloom.ir.versions import weight_version_bytes
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse, group_parameters, units_by_layer
from pipeloom.parallel.data.unit_layout import expert_axis
from pipeloom.plan.memory.memory_model import MemoryModel, num_parameters
from pipeloom.plan.memory.stage_moments import StageGradients, StageMoments, stage_moments
from pipeloom.plan.memory.state_bytes import NumberBytes, UnitBytes, unit_bytes

_COUNTED = frozenset({Op.F, Op.B, Op.I, Op.W, Op.OFFLOAD, Op.RELOAD, Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRAD})
_EXPERTS = "experts"  # the kind of a unit of parameters that expert-parallel processes divide
KINDS = {
    "parameters": "as forwards read them, all the time",
    "masters": "what the optimizer updates, where forwards read something else: masters, shards",
    "gradients": "full gradients, and sums over replicas",
    "optimizer": "optimizer states",
    "activations": "what forwards keep for backwards",
    "slices": "keys and values that slices of a sequence share, and their gradients",
    "skips": "values that skip stages, in flight to the ranks that use them",
    "gathered": "full parameters of zero3 while they are used",
    "recomputed": "activations of one block while its backward recomputes them",
    "temporary": "gradients of activations, and tensors that a layer makes and frees",
    "versions": "older weight versions of a stream",
    "buffers": "buffers of the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank of one replica, in bytes.

    Attributes:
        rank: of the pipeline.
        replica: number of the replica.
        kinds: peak memory of each of `KINDS`.
        peak: peak memory of all kinds together; at most the sum of `kinds`, whose peaks may be at different moments.
    """

    rank: int
    replica: int
    kinds: Mapping[str, float]
    peak: float


def memory_of_ranks(program: Program, model: MemoryModel, *, replica: int = 0) -> list[RankMemory]:
    """The memory of every rank of one replica while it runs `program` and updates its parameters.

    Args:
        program: what every replica runs.
        model: the layers, and how they are trained.
        replica: number of the replica. Under `parameter-server`, replica 0 holds more than the others. With uncut
            parameters, replicas differ a little.

    Raises:
        InputError: the model has another number of stages, or an unknown optimizer.
    """
    return [memory_of_rank(program, model, rank, replica=replica) for rank in range(program.num_ranks)]


def memory_of_rank(program: Program, model: MemoryModel, rank: int, *, replica: int = 0) -> RankMemory:
    """One rank of `memory_of_ranks`."""
    stages = program.schedule.num_stages
    if len(model.stages) != stages:
        raise InputError(
            f"model.stages has {len(model.stages)} entries: the schedule has {stages} stages. Give the layers of each."
        )
    walk = _Walk(program, model, rank, replica)
    most = walk.always()
    peak = total = sum(most.values())
    for now, together in walk.moments():
        for kind, size in now.items():
            most[kind] = max(most[kind], size)
        peak = max(peak, total + together)
    return RankMemory(rank=rank, replica=replica, kinds=most, peak=peak)


def update_memory(program: Program, model: MemoryModel, rank: int, *, replica: int = 0) -> tuple[dict[str, float], int]:
    """The bytes of model state on a rank when it updates, by kind: all that is there between steps, and gradients.

    Returns:
        The bytes by kind of `KINDS`, and the number of parameters of the rank.
    """
    walk = _Walk(program, model, rank, replica)
    units = units_of_rank(program, model, rank)
    layers = {
        name: size for stage in units for layer in model.stages[stage] for name, size in layer.parameter_sizes.items()
    }
    return walk.always() | {"gradients": walk.gradient_sums()}, sum(layers.values())


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


class _Walk:
    """One rank, from the first action of its program to the last."""

    def __init__(self, program: Program, model: MemoryModel, rank: int, replica: int) -> None:
        self._program, self._model, self._rank = program, model, rank
        self._held = program.placement.stages_of[rank]
        self._formats = NumberBytes.of(model.precision)
        self._units: dict[int, list[UnitBytes]] = {}  # by stage; units that several stages share, on the first of them
        self._replicas: dict[int, list[int]] = {}  # by stage, the number of replicas that share each unit
        self._layers: dict[int, tuple[tuple[int, ...], ...]] = {}  # by stage, the units that each layer reads
        self._gradients: dict[int, StageGradients] = {}
        data = program.data
        self._reduces = data is not None and data.degree > 1
        self._fine_reductions = self._reduces and data is not None and data.granularity is Granularity.MICROBATCH
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
        return StageGradients(made, shared, self._full_gradients(stage) if self._fine_reductions else None)

    def always(self) -> dict[str, float]:
        units = [unit for units in self._units.values() for unit in units]
        held = dict.fromkeys(KINDS, 0.0)
        for kind in ("parameters", "masters", "optimizer"):
            held[kind] = sum(getattr(unit, kind) for unit in units)
        layers = [layer for stage in self._held for layer in self._model.stages[stage]]
        held["buffers"] = self._formats.compute * sum(layer.buffer_elements for layer in layers)
        if self._program.schedule.microbatches_per_update is not None:
            of_stages = [self._formats.compute * num_parameters(stage) for stage in self._model.stages]
            held["versions"] = weight_version_bytes(self._program.schedule, of_stages)[self._rank] - held["parameters"]
        return held | dict.fromkeys(self._model.elsewhere, 0.0)

    def gradient_sums(self) -> float:
        """Bytes of gradients behind all reductions."""
        return sum(unit.reduced for units in self._units.values() for unit in units)

    def _gathered(self, stage: int) -> tuple[float, float, float]:
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

    def _full_gradients(self, stage: int) -> float:
        """Bytes of full gradients in a backward: of all units, or where each is reduced at once, of a layer's."""
        sizes = [unit.full_gradients for unit in self._units[stage]]
        if not self._fine_reductions:
            return sum(sizes)
        return max([*sizes, *(sum(sizes[unit] for unit in layer) for layer in self._layers[stage])], default=0.0)

    def _sending(self, stage: int, backwards: int) -> float:
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

    def _skip_bytes(self, stage: int) -> float:
        """Bytes of the values that one F of a stage hands to stages behind the next ones, live until its backward.

        They are used before: the backward of the stage waits for the forwards of their users.
        """
        sizes = self._model.skip_bytes
        return sum(sizes.get((skip.source, skip.target), 0.0) for skip in self._program.skips_from.get(stage, ()))

    def _of_stages(self) -> dict[tuple[int, int], StageMoments]:
        """By stage and slice."""
        slices = self._program.schedule.num_slices
        return {
            (stage, index): stage_moments(self._model, stage, index, slices, self._gradients[stage])
            for stage, index in product(self._held, range(slices))
        }

    def moments(self) -> Iterator[tuple[dict[str, float], float]]:
        """The bytes that come and go: during every action by kind, and the peak of all kinds together."""
        slices, split = self._program.schedule.num_slices, self._program.schedule.split_backwards
        of_stages = self._of_stages()
        shared = {stage: self._model.slice_bytes(stage, slices) for stage in self._held}
        stream = self._program.schedule.microbatches_per_update is not None
        activations = skipping = of_slices = 0.0
        skip_bytes = {stage: self._skip_bytes(stage) for stage in self._held}
        of_gathers: dict[int, tuple[float, float, float]] = {}
        gathered: dict[int, float] = {}
        coming: dict[int, list[float]] = {}  # of stages whose first computation has not run
        full: dict[int, float] = {}  # gradients
        reduced: dict[int, float] = {}
        of_stage = {stage: self._full_gradients(stage) for stage in self._held}
        backwards = dict.fromkeys(self._held, 0)  # since the last reduction
        for stage, op, microbatch, piece in self._program.orders[self._rank]:
            if op not in _COUNTED:
                continue
            index = piece or 0
            moments = of_stages[stage, index]
            if op in (Op.F, Op.RELOAD):
                activations += moments.kept
            if op is Op.F:
                of_slices += shared[stage][0] if index == 0 else 0.0
                skipping += skip_bytes[stage]
            if op is Op.UNSHARD:
                if stage not in of_gathers:
                    of_gathers[stage] = self._gathered(stage)
                gathered[stage], *coming[stage] = of_gathers[stage]
            elif op in (Op.F, Op.B, Op.I) and stage in coming:
                gathered[stage] = coming[stage][0]
            before = sum(full.values()) + sum(reduced.values())
            sending = inside = again = temporary = 0.0
            if op is Op.F:
                inside, temporary = moments.forward, moments.temporary[0]
            elif op in (Op.B, Op.I, Op.W):
                again = 0.0 if op is Op.W else moments.recomputed
                temporary = moments.temporary[2 if op is Op.W else 1]
                inside = moments.inputs
                if op is not Op.I:
                    known = stage in full
                    before -= full.get(stage, 0.0)
                    inside = moments.during(op, first=not known)
                    full[stage] = of_stage[stage]
                    backwards[stage] += 1
            of_data = op is Op.REDUCE_GRAD and microbatch is not None and self._reduces and not stream
            if of_data:
                inside = sending = self._sending(stage, backwards[stage])
                backwards[stage] = 0
            now = {
                "activations": activations,
                "gradients": sum(full.values()) + sum(reduced.values()) + sending,
                "slices": of_slices,
                "skips": skipping,
                "gathered": sum(gathered.values()),
                "recomputed": again,
                "temporary": temporary,
            }
            yield now, activations + of_slices + skipping + now["gathered"] + before + inside
            if op in (Op.F, Op.B, Op.I) and stage in coming:
                gathered[stage] = coming.pop(stage)[1]
            if op in (Op.B, Op.I):
                skipping -= skip_bytes[stage]
                # Block after block, gradients of keys and values come while the activations of the slice go.
                of_slices += shared[stage][1] if index == slices - 1 else 0.0
                of_slices -= sum(shared[stage]) if index == 0 else 0.0
            is_split = (stage, microbatch, piece) in split
            if op is Op.I:
                activations += moments.waiting - moments.kept
            elif op is Op.W:
                activations -= moments.waiting
            elif op is Op.OFFLOAD or (op is Op.B and not is_split):
                activations -= moments.kept
            elif op is Op.RESHARD:
                gathered.pop(stage, None)
            elif of_data:
                full.pop(stage, None)
                reduced[stage] = sum(unit.reduced for unit in self._units[stage])
