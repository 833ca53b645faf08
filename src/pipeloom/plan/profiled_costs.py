"""`ProfiledCosts`: costs of a model whose layers were measured. No torch here.

Seconds and bytes of other micro-batches follow from those of two by a straight line, or from one in proportion. Full
recomputation repeats a forward, and keeps the input.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.links import data_links, pipeline_network
from pipeloom.plan.costs.measured_links import measured_network, shared_links, step_end_seconds
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory import OPTIMIZERS, LayerMemory, MemoryModel
from pipeloom.plan.memory.choose import stage_bytes
from pipeloom.plan.memory.state_bytes import NEED_FULL_MATRICES
from pipeloom.plan.stage_times import Seconds
from pipeloom.sim import Costs, Network
from pipeloom.sim.costs import MOST_UNITS

WHOLE = {"tensor": 1, "context": 1, "expert": 1, "slices": 1, "sequence": False}
"""Keys of ``--fix`` that divide layers, of whose parts a profile has no times, and their values for whole layers."""
_UPDATE_BYTES, _STATE_BYTES = 24.0, 8.0  # of an update per parameter, and per number of state: read and written


class UnitRow(NamedTuple):
    """A unit on one micro-batch.

    Attributes:
        forward, backward: seconds.
        inputs, weights: seconds of I and W by themselves; of a profile file, which has none, half of the backward each.
        again: seconds of the forward of what full recomputation repeats.
        sent: bytes of its output.
        kept: bytes that its forward keeps.
        recomputed: the same with full recomputation.
    """

    forward: float
    backward: float
    inputs: float
    weights: float
    again: float
    sent: float
    kept: float
    recomputed: float


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Layers that stay together: one that a cut counts, and its neighbours that no cut counts.

    Attributes:
        name: of the counted layer.
        rows: by samples per micro-batch.
        parameters: shapes by canonical name.
        buffer_elements: elements of buffers.
    """

    name: str
    rows: Mapping[int, UnitRow]
    parameters: Mapping[str, tuple[int, ...]]
    buffer_elements: int = 0

    def at(self, samples: int) -> UnitRow:
        """On a micro-batch of `samples`."""
        sizes = sorted(self.rows)
        low, high = sizes[0], sizes[-1]
        if low == high:
            return UnitRow(*(value * samples / low for value in self.rows[low]))
        part = (samples - low) / (high - low)
        pairs = zip(self.rows[low], self.rows[high], strict=True)
        return UnitRow(*(max(a * min(1.0, samples / low), a + part * (b - a)) for a, b in pairs))


def check_whole(fixed: Mapping[str, Any], source: str) -> None:
    """Raises InputError where a value needs times that a profile has not; `source` begins the message."""
    parts = [name for name, whole in WHOLE.items() if fixed.get(name, whole) != whole]
    parts += ["recompute=selective"] if Recompute.SELECTIVE in fixed.get("recompute", ()) else []
    for wrong in parts[:1]:
        raise InputError(f"{source}: {wrong} needs times of parts of layers, which a profile has not. Remove it.")


def together(counted: Sequence[bool]) -> list[range]:
    """The layers of units: each that a cut counts, with those before the first and behind each that no cut counts."""
    starts = [at for at, counts in enumerate(counted) if counts][1:]
    return [range(start, end) for start, end in pairwise([0, *starts, len(counted)])]


@dataclass(frozen=True, kw_only=True)
class ProfiledCosts(StepCosts):
    """Costs of configurations of a measured model on one cluster.

    Attributes:
        units: the model in order.
        cluster: where it is trained; its devices are as fast as the one that was measured.
        name: of the model, for output.
        samples: the only size of micro-batches whose costs are known; None: those of others follow.
    """

    units: Sequence[Unit]
    cluster: Cluster
    name: str = "the model"
    samples: int | None = None
    _at: dict[int, list[UnitRow]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_blocks(self) -> int:
        return len(self.units)

    @property
    def tokens(self) -> int:
        return 1

    @property
    def expert_degrees(self) -> list[int]:
        return [1]

    @property
    def merges_backwards(self) -> bool:
        return self.cluster.measured is not None

    def unknown(self, of: Configuration) -> str | None:
        if of.inside != InsideStage():
            return "a profile has no times of parts of layers (tensor, sequence, context, expert)"
        if self.samples not in (None, of.microbatch_size):
            return f"the profile has times of micro-batches of {counted(self.samples, 'sample')} alone"
        return None

    def check(self, of: Configuration) -> None:
        """Whole layers are not shared; of others `unknown` says so."""

    def _rows(self, of: Configuration) -> list[UnitRow]:
        found = self._at.get(of.microbatch_size)
        if found is None:
            found = self._at[of.microbatch_size] = [unit.at(of.microbatch_size) for unit in self.units]
        return found

    def _stages(self, of: Configuration) -> list[range]:
        """The units of every stage."""
        ends = accumulate(of.blocks_of(len(self.units)))
        return [range(start, end) for start, end in pairwise([0, *ends])]

    def stage_seconds(self, of: Configuration) -> list[Seconds]:
        rows, found = self._rows(of), []
        for stage, units in enumerate(self._stages(of)):
            forward, backward = sum(rows[u].forward for u in units), sum(rows[u].backward for u in units)
            inputs, weights = sum(rows[u].inputs for u in units), sum(rows[u].weights for u in units)
            again = sum(rows[u].again for u in units) if of.recompute_of(stage) is Recompute.FULL else 0.0
            part = inputs / max(inputs + weights, 1e-12)
            found.append(Seconds(forward, part * backward + again, (1 - part) * backward))
        return found

    def _split(self, of: Configuration) -> list[float]:
        """For every stage, seconds of I and W over those of a whole backward; at least 1."""
        rows, found = self._rows(of), []
        for units in self._stages(of):
            apart = sum(rows[u].inputs + rows[u].weights for u in units)
            found.append(max(1.0, apart / max(sum(rows[u].backward for u in units), 1e-12)))
        return found

    def same_seconds(self, of: Configuration) -> Hashable:
        return of.microbatch_size

    def message_bytes(self, of: Configuration) -> float:
        return min(row.sent for row in self._rows(of))

    def kept_bytes(self, of: Configuration) -> list[float]:
        rows = self._rows(of)
        return [
            sum(rows[u].recomputed if of.recompute_of(stage) is Recompute.FULL else rows[u].kept for u in units)
            for stage, units in enumerate(self._stages(of))
        ]

    def memory_model(self, of: Configuration) -> MemoryModel:
        layers = [
            LayerMemory(
                name=unit.name,
                parameters=unit.parameters,
                kept_bytes={kind: row.recomputed if kind is Recompute.FULL else row.kept for kind in Recompute},
                buffer_elements=unit.buffer_elements,
                is_block=True,
                recompute_share={kind: float(kind is Recompute.FULL) for kind in Recompute},
            )
            for unit, row in zip(self.units, self._rows(of), strict=True)
        ]
        return MemoryModel(
            stages=[[layers[u] for u in units] for units in self._stages(of)],
            precision=of.precision,
            optimizer=of.optimizer,
            recompute=tuple(map(of.recompute_of, range(of.stages))),
            device="cuda" if self.cluster.measured is None else "cpu",
            whole_parameters=of.optimizer in NEED_FULL_MATRICES,
            elsewhere=frozenset({"optimizer"}) if of.offload_states else frozenset(),
        )

    def costs(self, of: Configuration) -> Costs:
        stages, memory, rows = self.stage_seconds(of), self.memory_model(of), self._rows(of)
        parameters, gradients = stage_bytes(memory, of.replicas)
        rates, pairs = self.cluster.beside(of.devices).rates, list(zip(stages, self._split(of), strict=True))
        # What the runtime does once per computation of a stage, on a measured machine.
        before, behind = (rates.second(f"stage {each}") if rates else 0.0 for each in ("forward", "backward"))
        return Costs(
            forward=tuple(each.forward + before for each in stages),
            backward_input=tuple(each.backward_input * split + behind for each, split in pairs),
            backward_weight=tuple(each.backward_weight * split + behind for each, split in pairs),
            backward=tuple(each.backward_input + each.backward_weight + behind for each in stages),
            message_bytes=tuple(rows[units[-1]].sent for units in self._stages(of)),
            activation_bytes=tuple(memory.kept_bytes(stage) for stage in range(of.stages)),
            parameter_bytes=parameters,
            gradient_bytes=gradients,
            units=tuple(self.stage_units(of)),
        )

    def stage_units(self, of: Configuration) -> list[int]:
        return [min(MOST_UNITS, len(units)) for units in self._stages(of)]

    def network(self, of: Configuration) -> Network:
        cluster, at = self.cluster.beside(of.devices), of.strides
        data = data_links(cluster, stride=at["pp"] if of.data == 1 else at["dp"], replicas=of.replicas)
        if cluster.measured is not None:
            data |= shared_links(cluster, of.strategy, has_masters=of.precision.has_masters)
            return measured_network(cluster, max(row.sent for row in self._rows(of)), data)
        return pipeline_network(cluster, ranks=of.pipeline, stride=at["pp"], **data)

    def _held(self, units: Sequence[int]) -> float:
        """Elements of parameters; one that several units share counts once."""
        shapes = {name: shape for unit in units for name, shape in self.units[unit].parameters.items()}
        return float(sum(map(math.prod, shapes.values())))

    def parameters(self, of: Configuration) -> list[float]:
        return [self._held(units) for units in self._stages(of)]

    def held_parameters(self, of: Configuration, stages: Sequence[int]) -> float:
        every = self._stages(of)
        return self._held([unit for stage in stages for unit in every[stage]])

    def update_seconds(self, of: Configuration, stages_of: Sequence[Sequence[int]]) -> float:
        held = max(self.held_parameters(of, stages) for stages in stages_of)
        held /= of.replicas if of.strategy.shards_optimizer else 1
        cluster = self.cluster.beside(of.devices)
        if cluster.measured is None or cluster.rates is None:
            moved = (_UPDATE_BYTES + _STATE_BYTES * OPTIMIZERS[of.optimizer]) * held
            return self.with_states(of, moved / cluster.memory_rate, held)
        turns = max(1.0, of.devices / cluster.measured.cores)
        return turns * cluster.rates.curve("update", held) + step_end_seconds(cluster, replicas=of.replicas)
