"""What a rank has of its stages: units of parameters, states, gradients; bytes of computations. No torch here."""

from functools import cached_property
from itertools import product

from pipeloom.common.division import gradient_parts
from pipeloom.ir import Granularity, Op, Program
from pipeloom.plan.memory.memory_model import MemoryModel, num_parameters
from pipeloom.plan.memory.stage_moments import StageMoments
from pipeloom.plan.memory.stage_units import ModelUnits, sends_parts
from pipeloom.plan.memory.state_bytes import NumberBytes


class RankUnits:
    """What one rank has of its stages, whatever the order of its computations.

    Args:
        program: with the placement, slices, skips and data axis.
        model: the layers, and how they are trained.
        rank: of the pipeline.
        units: of the stages of the model.

    Attributes:
        stages: of the rank.
        ran: those that it computes. With few micro-batches, ranks of bidirectional schedules do not run all.
        reduces: whether gradients are summed over replicas.
    """

    def __init__(self, program: Program, model: MemoryModel, rank: int, units: ModelUnits) -> None:
        self._program, self._model, self._units, self._rank = program, model, units, rank
        self._made: dict[int, frozenset[str]] = {}
        self.stages = program.placement.stages_of[rank]
        self.ran = {action.stage for action in program.orders[rank] if action.op is Op.F}
        self._formats = NumberBytes.of(model.precision)
        self._of = units.of_rank(rank)  # by stage; units that several stages share, on the first of them
        data = program.data
        self.reduces = data is not None and data.degree > 1
        self._fine_reductions = self.reduces and data is not None and data.granularity is Granularity.MICROBATCH

    def always(self) -> dict[str, float]:
        """Bytes by kind that are there all the time, without versions of parameters."""
        units = [unit for of in self._of.values() for unit in of.units]
        kinds = ("parameters", "masters", "optimizer")
        held: dict[str, float] = {kind: sum(getattr(unit, kind) for unit in units) for kind in kinds}
        layers = [layer for stage in self.stages for layer in self._model.stages[stage]]
        buffers = self._formats.compute * sum(layer.buffer_elements for layer in layers)
        return held | {"buffers": buffers, "messages": self._messages()}

    def _messages(self) -> float:
        """Bytes of shared memory for gradients that a replica sends to others of its host.

        A unit is sent when this replica has the sum of the one before, which the others may still be adding up. The
        memory of the two is kept for later steps.
        """
        if not sends_parts(self._program.data, self._model):
            return 0.0
        ran = (of for stage, of in self._of.items() if stage in self.ran)
        pairs = (pair for of in ran for pair in zip(of.units, of.replicas, strict=True))
        return sum(sorted(unit.sending * (degree - 1) / degree for unit, degree in pairs)[-2:])

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
        return sum(unit.reduced for unit in self._of[stage].units)

    def gradient_sums(self) -> float:
        """Bytes of gradients behind all reductions."""
        return sum(map(self.reduced, self.stages))

    def gathered(self, stage: int) -> tuple[float, float, float]:
        """Bytes of a stage's full parameters, see `StageUnits`."""
        return self._of[stage].gathered

    def full_gradients(self, stage: int) -> float:
        """Bytes of full gradients in a backward, see `StageUnits`."""
        return self._of[stage].full_gradients(fine=self._fine_reductions)

    @cached_property
    def tied_gradients(self) -> dict[int, tuple[float, set[int]]]:
        """By stage, bytes of full gradients of its parameters that later stages of the rank share, and all of these.

        Empty where gradients are reduced in backwards.
        """
        found: dict[int, tuple[float, set[int]]] = {}
        owners: dict[str, int] = {}
        shared: set[str] = set()
        for stage in () if self._fine_reductions else self.stages:
            elements = {n: size for layer in self._model.stages[stage] for n, size in layer.parameter_sizes.items()}
            for name, count in elements.items():
                if (owner := owners.setdefault(name, stage)) != stage:
                    size, users = found.get(owner, (0.0, {owner}))
                    size += 0.0 if name in shared else self._formats.gradient * count
                    found[owner] = size, users | {stage}
                    shared.add(name)
        return found

    def sending(self, stage: int, backwards: int) -> float:
        """Bytes of flat gradients while a stage is reduced, beside its full ones. Messages are counted elsewhere.

        Units are reduced one after another from the last on. Sharded ones are smaller from then on. In the first of
        `backwards`, the gradients of earlier units are not there yet.
        """
        units, data = self._of[stage].units, self._program.data
        missing = sum(unit.full_gradients for unit in units) if backwards == 1 and not self._fine_reductions else 0.0
        freed, most = 0.0, -missing
        for unit in reversed(units):
            missing = max(0.0, missing - unit.full_gradients)
            most = max(most, (0.0 if sends_parts(data, self._model) else unit.sending) - freed - missing)
            if data is not None and data.strategy.shards_optimizer and not self._fine_reductions:
                freed += unit.full_gradients - unit.reduced
        return most

    @cached_property
    def exchanged(self) -> dict[int, tuple[float, float]]:
        """By the stage of a REDUCE_GRAD of ranks that hold the same stages or tied parameters, bytes in and behind it.

        Inside are the gradients of other ranks and the sums, of one part at a time
        (`pipeloom.engine.stores.gradient_sum`). A sum takes the place of the rank's own gradient, if it has run the
        stage. Behind a reduction over replicas, the gradients of a unit are one piece of memory, which stays until all
        of them have sums.
        """
        found = {}
        for group in map(set, self._program.gradient_groups):
            if not (held := group.intersection(self.stages)):
                continue
            sizes: dict[str, float] = {}
            by_holders: dict[tuple[int, ...], dict[str, float]] = {}
            for stage in held:
                for name, size in self._units.gradient_bytes(stage).items():
                    homes = self._units.homes[name]
                    if group.issuperset(homes) and len(holders := self._program.ranks_of_group(homes)) > 1:
                        by_holders.setdefault(holders, {})[name] = sizes[name] = size
            pieces = self._pieces() if self.reduces else []
            now = most = 0.0
            summed: set[str] = set()
            for holders, of_holders in sorted(by_holders.items()):
                for part in gradient_parts(of_holders):
                    made_by = {name: [rank for rank in holders if name in self._made_by(rank)] for name in part}
                    received = sum(len({*made_by[name]} - {self._rank}) * sizes[name] for name in part)
                    most = max(most, now + received + sum(sizes[name] for name in part))
                    now += sum(sizes[name] for name in part if self.reduces or self._rank not in made_by[name])
                    summed.update(part)
                    now -= sum(sum(map(sizes.__getitem__, piece)) for piece in pieces if piece <= summed)
                    pieces = [piece for piece in pieces if not piece <= summed]
            found[min(held)] = most, now
        return found

    def _made_by(self, rank: int) -> frozenset[str]:
        """The parameters of which a rank of the pipeline makes gradients."""
        if rank not in self._made:
            stages = {action.stage for action in self._program.orders[rank] if action.op is Op.F}
            layers = (layer for stage in stages for layer in self._model.stages[stage])
            self._made[rank] = frozenset(name for layer in layers for name in layer.parameters)
        return self._made[rank]

    def _pieces(self) -> list[frozenset[str]]:
        """The parameters of each unit of the stages that the rank runs: their gradients are one piece of memory."""
        parts = self._units.parts_of_rank(self._rank)
        return [
            frozenset(use.name for use in uses)
            for stage, units in parts
            if stage in self.ran
            for uses in units.values()
        ]

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
            (stage, index): self._units.moments(stage, index, slices, self._of[stage].gradients)
            for stage, index in product(self.stages, range(slices))
        }
