"""What every rank of a program holds at most, by kind, from closed forms: nothing is made and nothing measured.

A rank's program is walked once. Parameters, masters, optimizer states, buffers and old versions of a stream are there
all the time; activations come with F and go with B or W, or to slower memory; whole gradients of a stage are there from
its first backward to the reduction that covers it; gathered parameters from UNSHARD to RESHARD. At granularity
microbatch buckets are gathered one ahead, so that two neighbours are there at once, and reduced one by one.

Not counted: messages on their way, what a single operation needs for itself, and what torch itself takes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipeloom.errors import InputError
from pipeloom.ir.action import Op
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.ir.schedule import Program
from pipeloom.ir.versions import weight_version_bytes
from pipeloom.parallel import Precision
from pipeloom.parallel.options import BUCKET_BYTES
from pipeloom.plan.memory.layer_memory import Layer, num_parameters
from pipeloom.plan.memory.state_bytes import Formats, UnitBytes, unit_bytes
from pipeloom.plan.memory.units import Held, units_of_rank

KINDS = {
    "parameters": "as forwards read them, all the time",
    "masters": "what the optimizer updates, where forwards read something else: masters, pieces",
    "gradients": "whole ones, and sums over copies",
    "optimizer": "its states",
    "activations": "what forwards keep for backwards",
    "gathered": "parameters of zero3 while they are used",
    "recomputed": "of one block, while its backward computes it again",
    "versions": "older parameters of a stream",
    "buffers": "of the model",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The bytes of one rank of one copy.

    Attributes:
        rank: of the pipeline.
        copy: of the pipeline's copies.
        kinds: of each of `KINDS`, the most at any moment.
        peak: the most of all together; not above their sum, for they need not have their most at one moment.
    """

    rank: int
    copy: int
    kinds: Mapping[str, float]
    peak: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What memory is counted of.

    Attributes:
        stages: the layers of every stage.
        precision: formats of numbers.
        optimizer: a name of `pipeloom.plan.memory.state_bytes.OPTIMIZERS`.
        recompute: of every stage.
        whole_parameters: whether copies own whole parameters (`pipeloom.DataParallel.layout`).
        elsewhere: those of `KINDS` that are in slower memory but while they are used.
        bucket_bytes: as of `pipeloom.DataParallel`.
    """

    stages: Sequence[Sequence[Layer]]
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    recompute: Sequence[Recompute] = ()
    whole_parameters: bool = False
    elsewhere: frozenset[str] = frozenset()
    bucket_bytes: int = BUCKET_BYTES

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage] if self.recompute else Recompute.NONE

    def kept_bytes(self, stage: int) -> float:
        """What F of one micro-batch keeps."""
        return sum(layer.kept_bytes[self.recompute_of(stage)] for layer in self.stages[stage])

    def recomputed_bytes(self, stage: int) -> float:
        """What a backward makes again at once: of the layer where that is most."""
        kind = self.recompute_of(stage)
        return max(layer.kept_bytes[Recompute.NONE] - layer.kept_bytes[kind] for layer in self.stages[stage])

    def recompute_share(self, stage: int) -> float:
        """What part of the stage's blocks is computed again."""
        blocks = [layer.recompute_share[self.recompute_of(stage)] for layer in self.stages[stage] if layer.is_block]
        return sum(blocks) / len(blocks) if blocks else 0.0


def memory_of_ranks(program: Program, model: Model, *, copy: int = 0) -> list[RankMemory]:
    """What every rank of one copy holds while it runs `program` and updates its parameters.

    Args:
        program: what every copy runs.
        model: the layers, and how they are trained.
        copy: which copy. Of a parameter server, copy 0 holds more than the others; where copies own whole parameters
            they differ a little.

    Raises:
        InputError: the model has another number of stages, or an unknown optimizer.
    """
    return [memory_of_rank(program, model, rank, copy=copy) for rank in range(program.num_ranks)]


def memory_of_rank(program: Program, model: Model, rank: int, *, copy: int = 0) -> RankMemory:
    """One rank of `memory_of_ranks`."""
    stages = program.schedule.num_stages
    if len(model.stages) != stages:
        raise InputError(f"layers of {len(model.stages)} stages for a schedule of {stages}: give those of each stage")
    return _Walk(program, model, rank, copy).memory()


class _Walk:
    """One rank, from the first action of its program to the last."""

    def __init__(self, program: Program, model: Model, rank: int, copy: int) -> None:
        self._program, self._model, self._rank, self._copy = program, model, rank, copy
        self._held = program.placement.stages_of[rank]
        self._formats = Formats.of(model.precision)
        self._units: dict[int, list[UnitBytes]] = {}  # of each stage; what several hold is the first one's
        self._layers: dict[int, list[set[int]]] = {}  # of each stage, the layers that need each unit
        self._make_units()
        data = program.data
        fine = data is not None and data.granularity is Granularity.MICROBATCH
        self._fine_gathers = fine and data is not None and data.shards_parameters
        self._reduces = data is not None and data.degree > 1
        self._fine_reductions = fine and self._reduces

    def _make_units(self) -> None:
        whole = self._model.whole_parameters
        for stage, (own, tied) in units_of_rank(self._program, self._model, self._rank).items():
            layers = self._model.stages[stage]
            size = self._program.data.degree if self._program.data else 1
            loads = [0] * size if whole else None
            units = [self._unit(group, layers, loads) for group in own]
            units += [self._unit(group, layers, [0] * size if whole else None) for group in tied]
            self._units[stage] = units
            runs = [set(range(group[0].layer, group[-1].layer + 1)) for group in own]
            self._layers[stage] = runs + [{held.layer for held in group} for group in tied]

    def _unit(self, group: Sequence[Held], layers: Sequence[Layer], loads: list[int] | None) -> UnitBytes:
        return unit_bytes(
            {held.name: held.shape for held in group},
            data=self._program.data,
            formats=self._formats,
            optimizer=self._model.optimizer,
            in_blocks={held.name for held in group if layers[held.layer].is_block},
            copy=self._copy,
            loads=loads,
        )

    def memory(self) -> RankMemory:
        always = self._always()
        most, peak = dict(always), sum(always.values())
        for now in self._moments():
            for kind, size in now.items():
                most[kind] = max(most[kind], size)
            peak = max(peak, sum(always.values()) + sum(now.values()))
        return RankMemory(rank=self._rank, copy=self._copy, kinds=most, peak=peak)

    def _always(self) -> dict[str, float]:
        units = [unit for units in self._units.values() for unit in units]
        held = dict.fromkeys(KINDS, 0.0)
        held["parameters"] = sum(unit.parameters for unit in units)
        held["masters"] = sum(unit.masters for unit in units)
        held["optimizer"] = sum(unit.optimizer for unit in units)
        layers = [layer for stage in self._held for layer in self._model.stages[stage]]
        held["buffers"] = self._formats.compute * sum(layer.buffer_elements for layer in layers)
        if self._program.schedule.microbatches_per_update is not None:
            of_stages = [self._formats.compute * num_parameters(stage) for stage in self._model.stages]
            held["versions"] = weight_version_bytes(self._program.schedule, of_stages)[self._rank] - held["parameters"]
        return held | dict.fromkeys(self._model.elsewhere, 0.0)

    def _gathered(self, stage: int) -> tuple[float, float, float]:
        """The most of a stage's parameters at its UNSHARD, in its first computation, and from then on.

        What is elsewhere is read, this copy's segment of it, before it is gathered bucket by bucket.
        """
        data, sizes = self._program.data, [unit.gathered for unit in self._units[stage]]
        away = "masters" in self._model.elsewhere
        read = 1 / data.degree if data is not None and self._reduces and away else 0.0
        if not self._fine_gathers:
            most = max((sum(sizes[: i + 1]) + read * sum(sizes[i:]) for i in range(len(sizes))), default=0.0)
            return read * sum(sizes) if read else most, most, sum(sizes)
        needed = list(zip(sizes, self._layers[stage], strict=True))

        def of(layers: set[int], but: Collection[int] = ()) -> float:
            """The units of `layers` that none of the layers `but` needs."""
            return sum(size for size, at in needed if at & layers and at.isdisjoint(but))

        most, count = 0.0, len(self._model.stages[stage])
        for way in (1, -1):  # forward and backward; the first two layers are read at the beginning
            first = 0 if way == 1 else count - 1
            most = max(most, of({first}) + read * of({first, first + way}) if read else 0.0)
            for now in range(count):
                ahead, after = now + way, now + 2 * way
                reading = max(of({ahead}, {now}), of({after}, {now, ahead}))
                most = max(most, of({now, ahead}) + read * reading)
        return most, most, most

    def _moments(self) -> list[dict[str, float]]:
        """What is there beside that in the time of every action."""
        slices = self._program.schedule.num_slices
        kept = {stage: self._model.kept_bytes(stage) / slices for stage in self._held}
        split = self._program.schedule.split_backwards
        stream = self._program.schedule.microbatches_per_update is not None
        activations = 0.0
        gathered: dict[int, float] = {}
        coming: dict[int, list[float]] = {}  # what is begun of that
        whole: dict[int, float] = {}  # gradients of stages
        reduced: dict[int, float] = {}
        moments = []
        for stage, op, microbatch, piece in self._program.orders[self._rank]:
            sending = again = 0.0
            if op in (Op.F, Op.RELOAD):
                activations += kept[stage]
            if op is Op.UNSHARD:
                gathered[stage], *coming[stage] = self._gathered(stage)
            elif op in (Op.F, Op.B, Op.I) and stage in coming:
                gathered[stage] = coming[stage][0]
            if op in (Op.B, Op.W):
                sizes = [unit.whole_gradients for unit in self._units[stage]]
                whole[stage] = max(sizes, default=0.0) if self._fine_reductions else sum(sizes)
            if op in (Op.B, Op.I):
                again = self._model.recomputed_bytes(stage) / slices
            of_data = op is Op.REDUCE_GRAD and microbatch is not None and self._reduces and not stream
            if of_data:
                sending = max((unit.sending for unit in self._units[stage]), default=0.0)
            moments.append(
                {
                    "activations": activations,
                    "gradients": sum(whole.values()) + sum(reduced.values()) + sending,
                    "gathered": sum(gathered.values()),
                    "recomputed": again,
                }
            )
            if op in (Op.F, Op.B, Op.I) and stage in coming:
                gathered[stage] = coming.pop(stage)[1]
            if op is Op.OFFLOAD or op is Op.W or (op is Op.B and (stage, microbatch, piece) not in split):
                activations -= kept[stage]
            elif op is Op.RESHARD:
                gathered.pop(stage, None)
            elif of_data:
                whole.pop(stage, None)
                reduced[stage] = sum(unit.reduced for unit in self._units[stage])
        return moments
