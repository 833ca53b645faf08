"""The bytes that autograd keeps for backwards, at their peak: storages counted once, parameters not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes(saved_tensors_hooks):
    """Counts inside its ``with`` block.

    Args:
        parameters: tensors that are there anyway.

    Attributes:
        peak: the most bytes that were kept at once.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__(self._pack, lambda kept: kept.tensor)
        self._counts = {parameter.untyped_storage()._cdata: 1 for parameter in parameters}  # never let go of
        self._now = 0
        self.peak = 0

    def _pack(self, tensor: Tensor) -> Any:
        return _Kept(tensor, self)

    def take(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        count = self._counts.get(storage._cdata, 0)
        self._counts[storage._cdata] = count + 1
        if not count:
            self._now += storage.nbytes()
            self.peak = max(self.peak, self._now)
        return storage._cdata

    def release(self, key: int, num_bytes: int) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
            self._now -= num_bytes


class _Kept:
    """A tensor that a graph keeps; gone with the graph."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter = tensor, counter
        self._key, self._bytes = counter.take(tensor), tensor.untyped_storage().nbytes()

    def __del__(self) -> None:
        self._counter.release(self._key, self._bytes)
