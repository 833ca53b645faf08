"""`SavedBytes`: counts the bytes that autograd saves for backwards during a run."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.autograd.split_backward import Repeatable
from pipeloom.slicing.context import Slice
from pipeloom.slicing.tokens import current_part


class _Saved(Repeatable):
    """A tensor that autograd saves; counted as long as autograd keeps it. Split backwards can read it."""

    __slots__ = ("_counter", "tensor")

    def __init__(self, tensor: Tensor, counter: "SavedBytes | None") -> None:
        self.tensor, self._counter = tensor, counter
        if counter is not None:
            counter.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter.change(self.tensor.untyped_storage(), -1)


class SavedBytes:
    """Counts the bytes that autograd saves for backwards in this thread, each storage once.

    Tensors that other hooks save, such as those of a checkpoint, are not counted; the inputs of a checkpoint are. Keys
    and values that slices of a sequence share are not counted (`pipeloom.slicing`).

    Args:
        excluded: tensors that are not counted.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = list(excluded)
        self._uses: Counter[int] = Counter()
        self.now = self.peak = 0

    @classmethod
    def beyond(cls, *modules: nn.Module) -> Self:
        """Counts everything except parameters and buffers of `modules`."""
        return cls(held for module in modules for held in (*module.parameters(), *module.buffers()))

    def change(self, storage: torch.UntypedStorage, uses: int) -> None:
        """Autograd saves a storage `uses` more times."""
        before = self._uses[storage._cdata]
        self._uses[storage._cdata] += uses
        if not before:
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        elif not self._uses[storage._cdata]:
            del self._uses[storage._cdata]
            self.now -= storage.nbytes()

    def keep(self, tensor: Tensor) -> _Saved:
        """The object that autograd saves in place of `tensor`."""
        key = tensor.untyped_storage()._cdata
        # Looked up each time, because zero3 gathers parameters into other memory.
        part = current_part()
        held = [*self._excluded, *(part.shared() if isinstance(part, Slice) else ())]
        excluded = key not in self._uses and any(each.untyped_storage()._cdata == key for each in held)
        return _Saved(tensor, None if excluded else self)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tensors that are saved inside the block."""
        with saved_tensors_hooks(self.keep, lambda saved: saved.tensor):
            yield
