"""Bytes of a unit's parameters, masters, gradients and optimizer states (ZeRO, arXiv:1910.02054, section 5).

For N elements of a unit, D replicas, e bytes per number in forwards, g bytes in gradient sums and 4 in updates, and k
float32 numbers of optimizer state per element, each replica holds:

    strategy           parameters     masters (16 bits)     gradients, at the end    optimizer
    ddp                e N            4 N                   g N                      4 k N
    parameter-server   e N            4 N on replica 0      g N on replica 0         4 k N on replica 0
    zero1, zero2       e N            4 N / D               g N / D                  4 k N / D
    zero3              -              4 N / D (always)      g N / D                  4 k N / D

zero3 keeps only its shards, in the format of updates. N counts the unit's flat memory: aligned parameters in D equal
segments. Gradients are full until they are reduced, and parameters of zero3 are full while they are gathered: a program
says when (`pipeloom.plan.memory.rank_memory`).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pipeloom.errors import InputError
from pipeloom.ir.data_axis import DataAxis
from pipeloom.parallel import Precision
from pipeloom.parallel.data.unit_layout import FlatLayout, own_segment

UPDATE_BYTES = 4
_NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

BLOCK_8BIT = 2048  # numbers of one byte that share a float32 scale

# Float32 numbers of optimizer state per element of a parameter.
OPTIMIZERS = {
    "sgd": 0.0,
    "momentum": 1.0,
    "lion": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
    "amsgrad": 3.0,
    "adafactor": 0.0,  # a row and a column of each matrix, see `state_elements`
    "muon": 1.0,  # of matrices of blocks; all else has AdamW's
    "adamw-8bit": 0.5 + 2 / BLOCK_8BIT,  # arXiv:2110.02861, section 2.1: a scale for each block of both states
}
NEED_FULL_MATRICES = ("adafactor", "muon")  # replicas own full parameters instead of shards


@dataclass(frozen=True, slots=True)
class NumberBytes:
    """Bytes per number: of parameters in forwards, and of gradient sums."""

    compute: int
    gradient: int
    has_masters: bool

    @classmethod
    def of(cls, precision: Precision) -> Self:
        compute = _NUMBER_BYTES[precision.dtype]
        return cls(compute, compute if precision.gradients == "same" else UPDATE_BYTES, precision.has_masters)


def state_elements(optimizer: str, shape: Sequence[int], *, in_block: bool) -> float:
    """Float32 numbers of optimizer state for a full parameter. Raises InputError for an unknown optimizer."""
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer={optimizer!r}: unknown optimizer. Use one of {', '.join(OPTIMIZERS)}.")
    count = math.prod(shape)
    if optimizer == "adafactor":  # arXiv:1804.04235: r + c numbers for each matrix of r x c, vectors whole
        return count // shape[-1] + count // shape[-2] if len(shape) > 1 else count
    if optimizer == "muon" and not (in_block and len(shape) > 1):
        return OPTIMIZERS["adamw"] * count
    if optimizer == "adamw-8bit":
        return count / 2 + 2 * -(-count // BLOCK_8BIT)
    return OPTIMIZERS[optimizer] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """One unit on one replica, in bytes.

    Attributes:
        parameters, masters, optimizer: held all the time.
        gathered: full module parameters, while they are gathered.
        full_gradients: from the first backward to the reduction.
        sending: flat gradients of the collective, in addition to the full ones when the reduction begins. Then the full
            gradients are freed, and the sum takes at most as much.
        reduced: from the reduction on.
    """

    parameters: float
    masters: float
    optimizer: float
    gathered: float
    full_gradients: float
    sending: float
    reduced: float


def unit_bytes(
    shapes: Mapping[str, Sequence[int]],
    *,
    data: DataAxis | None,
    formats: NumberBytes,
    optimizer: str,
    in_blocks: Collection[str],
    replica: int = 0,
    loads: list[int] | None = None,
) -> UnitBytes:
    """The bytes of a unit on one replica.

    Args:
        shapes: of its parameters.
        data: the data axis; None for a single float32 pipeline.
        formats: bytes per number.
        optimizer: a name of `OPTIMIZERS`.
        in_blocks: the parameters of repeated layers.
        replica: number of the replica.
        loads: where replicas own full parameters, the elements that each owns so far (`FlatLayout.by_parameters`).
            None: they own equal shards.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    count = sum(sizes)
    states = [state_elements(optimizer, shape, in_block=name in in_blocks) for name, shape in shapes.items()]
    data = data or DataAxis(degree=1)
    layout, segment = FlatLayout.of_unit(sizes, data, loads), own_segment(data.strategy, replica)
    shards = [layout.shard(index, segment) for index in range(len(sizes))]
    parts = [(stop - start) / size if size else 0.0 for (start, stop), size in zip(shards, sizes, strict=True)]
    own = layout.segment_elements if segment is not None else 0
    plain = not data.strategy.shards_optimizer and not formats.has_masters
    compute = formats.compute * (count if plain else layout.num_elements)
    sharded = data.strategy.shards_parameters
    return UnitBytes(
        parameters=0.0 if sharded else compute,
        masters=UPDATE_BYTES * own if formats.has_masters or sharded else 0.0,
        optimizer=UPDATE_BYTES * sum(state * part for state, part in zip(states, parts, strict=True)),
        gathered=compute if sharded else 0.0,
        full_gradients=formats.gradient * count,
        sending=formats.gradient * layout.num_elements if data.degree > 1 else 0.0,
        reduced=formats.gradient * (own if data.degree > 1 else count),
    )
