"""The bytes of tensors that come to be while something runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Births(TorchDispatchMode):
    """Every storage that comes to be, beside those of `outside`.

    Args:
        outside: what is there anyway.
        watch_peak: look after every operation, which is slow.

    Attributes:
        peak: the most bytes alive behind an operation, where that is watched.
    """

    def __init__(self, outside: Sequence[Tensor], *, watch_peak: bool = False) -> None:
        super().__init__()
        self._outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self._born: dict[int, tuple[StorageWeakRef, int]] = {}
        self._watch_peak = watch_peak
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._outside:
                    self._born[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self._watch_peak:
            self.peak = max(self.peak, self.alive_bytes())
        return result

    def alive_bytes(self) -> int:
        """Of storages that are still there."""
        self._born = {key: entry for key, entry in self._born.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._born.values())
