"""Model state per optimizer: bytes per parameter by the formulas of ZeRO, and as a run's ranks hold them.

`bytes_per_parameter` is the table of `pipeloom.plan.memory.state_bytes` for one parameter. `optimizer_rows` adds up the
units of a rank, with padding, row and column sums by shape, and whole matrices where an optimizer needs them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pipeloom.ir import DataStrategy, Program
from pipeloom.plan.memory.memory_model import MemoryModel
from pipeloom.plan.memory.rank_memory import update_memory
from pipeloom.plan.memory.state_bytes import NEED_FULL_MATRICES, UPDATE_BYTES, NumberBytes, state_elements

STATES = {  # what each optimizer keeps per parameter, and where it is described
    "sgd": ("none", "-"),
    "momentum": ("momentum", "-"),
    "adafactor": ("row and column sums", "arXiv:1804.04235"),
    "lion": ("momentum", "arXiv:2302.06675"),
    "muon": ("momentum; AdamW's outside blocks", "kellerjordan.github.io/posts/muon"),
    "adamw": ("two moments", "arXiv:1711.05101"),
    "adamw-8bit": ("two moments of 8 bits, scales", "arXiv:2110.02861"),
}
UPDATE_KINDS = ("parameters", "masters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        optimizer: a key of `STATES`.
        state_numbers: float32 numbers of state per parameter of this model.
        formula: bytes per parameter of a process, by kind of `UPDATE_KINDS`.
        ranks: bytes that each rank holds when it updates, by kind.
        num_parameters: of each rank.
    """

    optimizer: str
    state_numbers: float
    formula: Mapping[str, float]
    ranks: tuple[Mapping[str, float], ...]
    num_parameters: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The rank that holds most."""
        return max(range(len(self.ranks)), key=lambda rank: sum(self.ranks[rank].values()))

    @property
    def held(self) -> dict[str, float]:
        """Bytes per parameter of the largest rank, by kind."""
        return {kind: size / self.num_parameters[self.largest] for kind, size in self.ranks[self.largest].items()}


def bytes_per_parameter(
    state_numbers: float, strategy: DataStrategy, degree: int, formats: NumberBytes
) -> dict[str, float]:
    """Bytes per parameter that a process holds between backward and update (ZeRO, arXiv:1910.02054, section 5).

    Args:
        state_numbers: float32 numbers of optimizer state per parameter.
        strategy: how replicas shard; of `parameter-server`, replica 0.
        degree: replicas that share a parameter.
        formats: bytes per number.
    """
    states = degree if strategy.shards_optimizer else 1
    full = strategy.shards_parameters
    return {
        "parameters": 0.0 if full else float(formats.compute),
        "masters": UPDATE_BYTES / states if formats.has_masters or full else 0.0,
        "gradients": formats.gradient / states,
        "optimizer": UPDATE_BYTES * state_numbers / states,
    }


def optimizer_rows(program: Program, model: MemoryModel, optimizers: Iterable[str] = STATES) -> list[OptimizerRow]:
    """Every optimizer on the same model, ranks and replicas; replica 0 holds the most.

    Args:
        program: what every replica runs.
        model: the layers, and how they are trained; its optimizer is replaced.
        optimizers: names of `STATES`.
    """
    data, formats = program.data, NumberBytes.of(model.precision)
    strategy, degree = (DataStrategy.DDP, 1) if data is None else (data.strategy, data.degree)
    rows = []
    for name in optimizers:
        of = replace(model, optimizer=name, whole_parameters=name in NEED_FULL_MATRICES)
        numbers = _state_numbers(of)
        held = [update_memory(program, of, rank) for rank in range(program.num_ranks)]
        row = OptimizerRow(
            optimizer=name,
            state_numbers=numbers,
            formula=bytes_per_parameter(numbers, strategy, degree, formats),
            ranks=tuple({kind: sizes[kind] for kind in UPDATE_KINDS} for sizes, _ in held),
            num_parameters=tuple(count for _, count in held),
        )
        rows.append(row)
    return rows


def _state_numbers(model: MemoryModel) -> float:
    """Float32 numbers of state per parameter, over the parameters of all stages; a shared one counts once."""
    shapes = {
        name: (shape, layer.is_block)
        for stage in model.stages
        for layer in stage
        for name, shape in layer.parameters.items()
    }
    states = sum(state_elements(model.optimizer, shape, in_block=block) for shape, block in shapes.values())
    return states / sum(math.prod(shape) for shape, _ in shapes.values())
