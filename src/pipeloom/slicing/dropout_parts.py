"""Dropout where processes share a layer: masks are drawn for the full tensor, and each process takes its part."""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeloom.errors import InputError

Parts = Mapping[int, tuple[int, int]]


class DropoutParts(NamedTuple):
    """Which part of a dropout's mask a process takes; a module has it as its attribute `dropout_parts`.

    Attributes:
        values: by dimension of the tensor [batch, tokens, ...], the index of the part and the number of equal parts.
        weights: the same of attention weights [batch, heads, queries, keys].
        one_generator: whether the processes are threads that draw from one generator, so only slices have equal masks.
    """

    values: Parts
    weights: Parts
    one_generator: bool = False


_WHOLE = DropoutParts({}, {})


def dropout_parts(owner: Hashable) -> DropoutParts:
    """The `DropoutParts` of a module, or of the module in a pair (module, name)."""
    module = owner[0] if isinstance(owner, tuple) and owner else owner
    parts: DropoutParts = getattr(module, "dropout_parts", _WHOLE)
    return parts


def full_shape(shape: Sequence[int], parts: Parts) -> list[int]:
    """The shape of the tensor of which one of `shape` is a part."""
    return [size * parts[dim][1] if dim in parts else size for dim, size in enumerate(shape)]


def own_part(mask: Tensor, parts: Parts) -> Tensor:
    """The part of a full mask that this process takes: a copy, since a view would keep the full mask for backward."""
    for dim, (index, number) in parts.items():
        size = mask.shape[dim] // number
        mask = mask.narrow(dim, index * size, size)
    return mask.clone() if parts else mask


def draw_kept(x: Tensor, p: float, parts: DropoutParts) -> Tensor:
    """What a dropout keeps of `x`, 1 or 0, drawn by torch's generator as ``F.dropout`` of the full tensor does.

    Raises:
        InputError: the processes are threads.
    """
    if parts.one_generator:
        raise InputError(
            "dropout on tensor-parallel ranks that are threads: they draw from one generator, so their masks would "
            "differ. Pass slices=[number of tokens] to Pipeline, or use processes."
        )
    return own_part(x.new_empty(full_shape(x.shape, parts.values)).bernoulli_(1 - p), parts.values)
