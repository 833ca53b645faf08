"""Bytes of parameters, masters, gradients and optimizer states of one copy's part (ZeRO, arXiv:1910.02054, section 5).

For N parameters of a unit (a bucket of neighbours, or what several stages hold), D copies, numbers of e bytes in
forwards, g in sums of gradients and 4 in updates, k float32 numbers of optimizer state a parameter:

    strategy           parameters     masters (16 bits)    gradients, at the end    optimizer
    ddp                e N            4 N                  g N                      4 k N
    parameter-server   e N            4 N on copy 0        g N on copy 0            4 k N on copy 0
    zero1, zero2       e N            4 N / D              g N / D                  4 k N / D
    zero3              -              4 N / D (always)     g N / D                  4 k N / D

zero3 keeps nothing beside its pieces, whose numbers are those of updates. N is what the unit's memory holds, with every
parameter aligned and D equal segments. Before they are reduced, gradients are whole, and parameters of zero3 while they
are gathered: when that is so a program says, see `pipeloom.plan.memory.rank_memory`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeloom.errors import InputError
from pipeloom.ir.data_axis import DataAxis, DataStrategy
from pipeloom.parallel import Precision
from pipeloom.parallel.data.flat_layout import FlatLayout

_UPDATE_BYTES = 4
_NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Float32 numbers of state for each parameter.
OPTIMIZERS = {
    "sgd": 0.0,
    "momentum": 1.0,
    "lion": 1.0,
    "adam": 2.0,
    "adamw": 2.0,
    "amsgrad": 3.0,
    "adafactor": 0.0,  # a row and a column of each matrix, see `state_elements`
    "muon": 1.0,  # of matrices of blocks; all else has AdamW's
}


@dataclass(frozen=True, slots=True)
class Formats:
    """Bytes of a number, by what it is for."""

    compute: int
    gradient: int
    has_masters: bool

    @classmethod
    def of(cls, precision: Precision) -> Formats:
        compute = _NUMBER_BYTES[precision.dtype]
        return cls(compute, compute if precision.gradients == "same" else _UPDATE_BYTES, precision.has_masters)


def state_elements(optimizer: str, shape: Sequence[int], *, in_block: bool) -> float:
    """Float32 numbers that an optimizer keeps of a whole parameter.

    Raises:
        InputError: an unknown optimizer.
    """
    if optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer {optimizer!r} is unknown: it is one of {', '.join(OPTIMIZERS)}; take one of them")
    count = math.prod(shape)
    if optimizer == "adafactor":  # arXiv:1804.04235: r + c numbers for a matrix of r x c, vectors whole
        return sum(shape) if len(shape) > 1 else count
    if optimizer == "muon" and not (in_block and len(shape) > 1):
        return OPTIMIZERS["adamw"] * count
    return OPTIMIZERS[optimizer] * count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitBytes:
    """One unit on one copy.

    Attributes:
        parameters, masters, optimizer: held all the time.
        gathered: what module parameters take beside that, while they are gathered.
        whole_gradients: from the first backward to the reduction.
        sending: when its reduction begins, beside the whole gradients: a copy for the collective. Then the gradients
            are let go, and what comes of it takes no more than they did.
        reduced: from the reduction on.
    """

    parameters: float
    masters: float
    optimizer: float
    gathered: float
    whole_gradients: float
    sending: float
    reduced: float


def unit_bytes(
    shapes: Mapping[str, Sequence[int]],
    *,
    data: DataAxis | None,
    formats: Formats,
    optimizer: str,
    in_blocks: Collection[str],
    copy: int = 0,
    loads: list[int] | None = None,
) -> UnitBytes:
    """What one copy holds of a unit.

    Args:
        shapes: of its parameters.
        data: the copies; None for a pipeline that runs alone in float32.
        formats: bytes of numbers.
        optimizer: a name of `OPTIMIZERS`.
        in_blocks: the parameters of layers that repeat.
        copy: which one.
        loads: where copies own whole parameters, what each owns of other units (see `FlatLayout.by_parameters`); what
            this one adds is added. None: they own equal pieces.
    """
    sizes = [math.prod(shape) for shape in shapes.values()]
    count = sum(sizes)
    states = [state_elements(optimizer, shape, in_block=name in in_blocks) for name, shape in shapes.items()]
    if data is None:
        whole = formats.gradient * count
        return UnitBytes(
            parameters=formats.compute * count,
            masters=0.0,
            optimizer=_UPDATE_BYTES * sum(states),
            gathered=0.0,
            whole_gradients=whole,
            sending=0.0,
            reduced=whole,
        )
    strategy = data.strategy
    one_segment = strategy in (DataStrategy.DDP, DataStrategy.PARAMETER_SERVER)
    if loads is None or one_segment:
        layout = FlatLayout.by_elements(sizes, 1 if one_segment else data.degree)
    else:
        layout = FlatLayout.by_parameters(sizes, loads)
    segment = 0 if one_segment else copy
    owns = strategy is not DataStrategy.PARAMETER_SERVER or copy == 0
    pieces = [layout.piece(index, segment if owns else None) for index in range(len(sizes))]
    parts = [(stop - start) / size if size else 0.0 for (start, stop), size in zip(pieces, sizes, strict=True)]
    own = layout.segment_elements if owns else 0
    plain = strategy is DataStrategy.DDP and not formats.has_masters
    compute = formats.compute * (count if plain else layout.num_elements)
    sharded = data.shards_parameters
    return UnitBytes(
        parameters=0.0 if sharded else compute,
        masters=_UPDATE_BYTES * own if formats.has_masters or sharded else 0.0,
        optimizer=_UPDATE_BYTES * sum(state * part for state, part in zip(states, parts, strict=True)),
        gathered=compute if sharded else 0.0,
        whole_gradients=formats.gradient * count,
        sending=formats.gradient * layout.num_elements if data.degree > 1 else 0.0,
        reduced=formats.gradient * (own if data.degree > 1 else count),
    )
