"""`SavedBytes`: how many bytes autograd keeps for backwards, as a run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.autograd.split_backward import Repeatable


class _Saved(Repeatable):
    """A tensor that autograd keeps; counted as long as it does. Split backwards read it as they would without."""

    __slots__ = ("_counter", "tensor")

    def __init__(self, tensor: Tensor, counter: SavedBytes | None) -> None:
        self.tensor, self._counter = tensor, counter
        if counter is not None:
            counter.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter.change(self.tensor.untyped_storage(), -1)


class SavedBytes:
    """Counts the bytes that autograd keeps for backwards, each storage once.

    What a checkpoint or another mover keeps in its own way is not seen, its inputs are. Of this thread alone.

    Args:
        own: what is there anyway: it does not count.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        self._own = list(own)
        self._uses: Counter[int] = Counter()
        self.now = self.peak = 0

    @classmethod
    def beside(cls, *modules: nn.Module) -> SavedBytes:
        """Of what is kept beside parameters and buffers."""
        return cls(held for module in modules for held in (*module.parameters(), *module.buffers()))

    def change(self, storage: torch.UntypedStorage, uses: int) -> None:
        """Autograd keeps a storage once more, or once less."""
        before = self._uses[storage._cdata]
        self._uses[storage._cdata] += uses
        if not before:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        elif not self._uses[storage._cdata]:
            del self._uses[storage._cdata]
            self.now -= storage.nbytes()

    def keep(self, tensor: Tensor) -> _Saved:
        """What autograd gets in the place of a tensor that it wants to keep."""
        key = tensor.untyped_storage()._cdata
        # Looked up anew each time: zero3 gathers parameters into other memory.
        own = key not in self._uses and any(held.untyped_storage()._cdata == key for held in self._own)
        return _Saved(tensor, None if own else self)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is kept from here on."""
        with saved_tensors_hooks(self.keep, lambda saved: saved.tensor):
            yield
