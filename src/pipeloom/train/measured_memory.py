"""What the processes of a run really hold, beside what was predicted for them: ``memory.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from pipeloom.plan.memory import MemoryRow, write_memory
from pipeloom.runtime import Pipeline
from pipeloom.runtime.split_backward import Repeatable
from pipeloom.train.config import TrainConfig
from pipeloom.train.group import Group
from pipeloom.train.planned_memory import memory_rows

_LOOKED_AT = 2  # the first steps: the second has optimizer states, and warm caches


class _Saved(Repeatable):
    """A tensor that autograd keeps; counted as long as it does. Split backwards read it as they would without."""

    __slots__ = ("_counter", "tensor")

    def __init__(self, tensor: Tensor, counter: KeptBytes | None) -> None:
        self.tensor, self._counter = tensor, counter
        if counter is not None:
            counter.change(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        if self._counter is not None:
            self._counter.change(self.tensor.untyped_storage(), -1)


class KeptBytes:
    """Counts the bytes that autograd keeps for backwards, each storage once.

    What a checkpoint or another mover keeps in its own way is not seen, its inputs are. Of this thread alone.

    Args:
        modules: their parameters and buffers do not count.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._own: list[Tensor] = [held for each in modules for held in (*each.parameters(), *each.buffers())]
        self._uses: Counter[int] = Counter()
        self.now = self.peak = 0

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
        with torch.autograd.graph.saved_tensors_hooks(self.keep, lambda saved: saved.tensor):
            yield


class MemoryProbe:
    """Looks at the first steps of a run, and writes down what they took.

    Args:
        pipe, optimizer: of this process.
        config: of the run.
        group: its processes.
        vocabulary_size: of its model.
    """

    def __init__(
        self,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        config: TrainConfig,
        group: Group,
        vocabulary_size: int,
    ) -> None:
        self._pipe, self._optimizer = pipe, optimizer
        self._config, self._group, self._vocabulary_size = config, group, vocabulary_size
        self._measured: dict[str, float | None] = {}

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, the `number`-th of this process."""
        if number >= _LOOKED_AT:
            yield
            return
        kept = KeptBytes(list(self._pipe.modules()))
        self._pipe.record_peaks()
        with kept.counting():
            yield
        self._pipe.record_peaks(False)
        moves = self._config.memory.offload_activations is not None  # by hooks of its own
        self._measured["activations"] = None if moves else kept.peak

    def look(self, number: int) -> None:
        """Between the backwards of the `number`-th step and its update."""
        if number >= _LOOKED_AT:
            return
        held, peak = self._pipe.held_bytes(), self._pipe.peak_bytes()
        self._measured |= {
            "parameters": held.parameters,
            "masters": held.masters,
            "gradients": peak.gradients,
            "gathered": peak.gathered,
            "buffers": sum(buffer.nbytes for stage in self._pipe.modules() for buffer in stage.buffers()),
        }

    def write(self, directory: Path) -> None:
        """Every process calls it at the end; process 0 writes."""
        states = (value for state in self._optimizer.state.values() for value in state.values())
        sizes = [value.nbytes for value in states if isinstance(value, Tensor) and value.dim()]
        self._measured["optimizer"] = sum(sizes)
        if torch.cuda.is_available():
            self._measured["peak"] = torch.cuda.max_memory_allocated()
        gathered = [json.loads(text) for text in self._group.all_gather(json.dumps(self._measured).encode())]
        if self._group.rank != 0:
            return
        rows = memory_rows(self._config, self._vocabulary_size, self._group.device)
        if len(gathered) == 1:  # all ranks are one process
            rows = [_together(rows)]
        write_memory(directory, [_measured(row, gathered[row.process]) for row in rows])


def _together(rows: list[MemoryRow]) -> MemoryRow:
    kinds = {kind: sum(row.predicted[kind] or 0.0 for row in rows) for kind in rows[0].predicted}
    return MemoryRow(process=0, copy=0, rank=0, predicted=kinds, measured={})


def _measured(row: MemoryRow, measured: dict[str, float | None]) -> MemoryRow:
    return MemoryRow(process=row.process, copy=row.copy, rank=row.rank, predicted=row.predicted, measured=measured)
