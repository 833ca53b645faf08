"""Values of a pipe: a tensor or a tuple of tensors, split into micro-batches along dimension 0."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import InputError, PipeTypeError, folded

Value = Tensor | tuple[Tensor, ...]


def check_value(value: Any, place: str) -> None:
    """Check that `value` is a tensor or a tuple of tensors; `place` says what it is, for the message.

    Raises:
        PipeTypeError: it is not.
    """
    if isinstance(value, Tensor) or (type(value) is tuple and all(isinstance(each, Tensor) for each in value)):
        return
    wrong = next((each for each in value if not isinstance(each, Tensor)), value) if type(value) is tuple else value
    raise PipeTypeError(f"{place} is {folded(wrong)}: must be a tensor or a tuple of tensors.")


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value."""
    return (value,) if isinstance(value, Tensor) else value


def split(tensors: Sequence[Tensor], chunks: int) -> list[tuple[Tensor, ...]]:
    """The tensors of each micro-batch: at most `chunks` of them, as `torch.chunk` splits a tensor.

    A tensor that occurs several times does so in each micro-batch.

    Raises:
        InputError: a tensor without dimensions, or tensors of different batch sizes.
    """
    for tensor in tensors:
        if not tensor.dim():
            raise InputError("an input has no dimension 0 to split into micro-batches. Give it a batch dimension.")
    sizes = [len(tensor) for tensor in tensors]
    if len(set(sizes)) > 1:
        raise InputError(
            f"inputs have batch sizes {sizes}: all are split along dimension 0. Give all inputs the same batch size."
        )
    parts = {id(tensor): tensor.chunk(chunks if len(tensor) else 1) for tensor in tensors}
    return list(zip(*(parts[id(tensor)] for tensor in tensors), strict=True))


def first_places(columns: Sequence[Sequence[Tensor]]) -> list[int]:
    """Where each tensor of a value occurs first, in every micro-batch; `columns` has the micro-batches' tensors."""
    keys = [tuple(map(id, each)) for each in zip(*columns, strict=False)]
    return list(map(keys.index, keys))


def gather(parts: Sequence[Value]) -> Value:
    """The outputs of the micro-batches as the output of the batch; a tensor that occurs several times stays one.

    Raises:
        InputError: micro-batches differ in their number of tensors or in their shapes, or a tensor has no dimension.
    """
    columns = [tensors_of(part) for part in parts]
    if len({(isinstance(part, Tensor), len(column)) for part, column in zip(parts, columns, strict=True)}) > 1:
        raise InputError("the last layer returns another number of tensors for some micro-batches: must be the same.")
    if len(parts) > 1 and any(not tensor.dim() for tensor in columns[0]):
        raise InputError(
            "the last layer returns a tensor without dimensions, which has no batch to join. Move the loss out of the "
            "pipe, or use chunks=1."
        )
    for each in zip(*columns, strict=True):
        shapes = list(dict.fromkeys(tuple(tensor.shape[1:]) for tensor in each))
        if len(shapes) > 1:
            raise InputError(
                f"the last layer returns tensors of shapes [samples, ...] with {shapes[0]} and {shapes[1]} behind the "
                "samples for two micro-batches, which cannot be joined. Return tensors of one shape, or use chunks=1."
            )
    joined: list[Tensor] = []
    for place, each in zip(first_places(columns), zip(*columns, strict=True), strict=True):
        if place < len(joined):
            joined.append(joined[place])
        else:
            joined.append(each[0] if len(parts) == 1 else torch.cat(each))
    return joined[0] if isinstance(parts[0], Tensor) else tuple(joined)


def num_microbatches(value: Value, chunks: int) -> int:
    """The number of micro-batches of a value.

    Raises:
        InputError: the value has no batch dimension.
    """
    tensors = tensors_of(value)
    if not tensors:
        raise InputError("the input is an empty tuple: it has no batch to split.")
    return len(split([tensor.detach() for tensor in tensors], chunks))
