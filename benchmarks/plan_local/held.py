"""Bytes that a step holds for backwards: what autograd saves, and what W needs between I and W."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any

from torch import Tensor

from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.autograd.split_backward import WeightGradients
from pipeloom.ir import Op
from pipeloom.ir.text import parse_action
from pipeloom.processes.black_box import ActionObserver
from pipeloom.training import Pipeline

_WALKED = list, tuple, FunctionType, CellType


class HeldBytes(ActionObserver):
    """Looks before every action of a pipeline while it counts.

    Attributes:
        peak: in bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._saved: SavedBytes | None = None
        self._parameters: set[int] = set()
        self._waiting = self.peak = 0
        self._op = Op.F  # of the action that runs

    def begins(self, action: str) -> None:
        if self._saved is not None:
            self._look(self._saved)
            self._op = parse_action(action).op

    @contextmanager
    def counting(self, pipeline: Pipeline) -> Iterator[None]:
        """Count inside the block."""
        self._parameters = {p.untyped_storage()._cdata for p in pipeline.parameters()}
        self._saved, self._waiting, self.peak = SavedBytes.beyond(*pipeline.modules()), 0, 0
        with self._saved.counting():
            yield
        self._look(self._saved)
        self._saved = None

    def _look(self, saved: SavedBytes) -> None:
        """Add the peak of the action that ends, and begin with that of the next one."""
        self.peak = max(self.peak, saved.peak + self._waiting)
        saved.peak = saved.now
        if self._op not in (Op.I, Op.W):
            return
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in _waiting()}
        counted = saved._uses.keys() | self._parameters
        self._waiting = sum(size for key, size in storages.items() if key not in counted)


def _waiting() -> Iterator[Tensor]:
    """The tensors that W will read."""
    for found in [each for each in gc.get_objects() if type(each) is WeightGradients]:
        seen, left = set[int](), [found._formulas, found._gradients, found._ready]
        while left:
            each: Any = left.pop()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, Tensor):
                yield each
            elif isinstance(each, _WALKED):
                more = gc.get_referents(each) if not isinstance(each, FunctionType) else each.__closure__ or ()
                left += more
