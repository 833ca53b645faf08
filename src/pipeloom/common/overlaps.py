"""Which tensors lie in the same memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

_MAX_WORK = 1000  # steps of the search for a common element


def share_storage(one: Tensor, other: Tensor) -> bool:
    """Whether both tensors are parts of the same memory, which they may use different elements of."""
    found = _storage_of(one)
    return found != 0 and found == _storage_of(other)


def _storage_of(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a tensor without a storage of its own
        return 0


def overlapping(tensors: Sequence[Tensor]) -> list[bool]:
    """For each tensor, whether a change of it in place may change another one; the same tensor twice does not count."""
    found = [False] * len(tensors)
    if len(tensors) < 2 or len({_storage_of(tensor) for tensor in tensors}) == len(tensors):
        return found
    for index, one in enumerate(tensors):
        for position, other in enumerate(tensors[:index]):
            if one is not other and share_storage(one, other) and _have_common_element(one, other):
                found[index] = found[position] = True
    return found


class _Elements:
    """The places of a tensor's elements for numpy, which does not read them: they may be on another device."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }


def _have_common_element(one: Tensor, other: Tensor) -> bool:
    try:
        places = np.asarray(_Elements(one)), np.asarray(_Elements(other))
        return np.shares_memory(*places, max_work=_MAX_WORK)  # type: ignore[arg-type]  # numpy's types know -1 and 0
    except np.exceptions.TooHardError:
        return True
