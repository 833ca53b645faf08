"""Measured memory of the processes of a run, and its prediction: ``memory.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.plan.memory import MemoryRow, write_memory
from pipeloom.train.config.memory import memory_rows
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.output.directory import writing
from pipeloom.train.process_group import Group
from pipeloom.training import Pipeline

_LOOKED_AT = 2  # first steps that are measured: the second has optimizer states and warm caches


class MemoryProbe:
    """Measures memory in the first steps of a run.

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
        kept = SavedBytes.beyond(*self._pipe.modules())
        self._pipe.memory.record_peaks()
        with kept.counting():
            yield
        self._pipe.memory.record_peaks(False)
        moves = self._config.memory.offload_activations is not None  # which uses its own hooks
        self._measured["activations"] = None if moves else kept.peak

    def look(self, number: int) -> None:
        """Between the backwards of the `number`-th step and its update."""
        if number >= _LOOKED_AT:
            return
        held, peak = self._pipe.memory.held_bytes(), self._pipe.memory.peak_bytes()
        self._measured |= {
            "parameters": held.parameters,
            "masters": held.masters,
            "gradients": peak.gradients,
            "gathered": peak.gathered,
            "buffers": sum(buffer.nbytes for stage in self._pipe.modules() for buffer in stage.buffers()),
        }

    def write(self, directory: Path) -> None:
        """Write the file on process 0; every process calls it at the end."""
        states = (value for state in self._optimizer.state.values() for value in state.values())
        sizes = [value.nbytes for value in states if isinstance(value, Tensor) and value.dim()]
        self._measured["optimizer"] = sum(sizes) - getattr(self._optimizer, "offloaded_bytes", 0)
        if torch.cuda.is_available():
            self._measured["peak"] = torch.cuda.max_memory_allocated()
        gathered = [json.loads(text) for text in self._group.all_gather(json.dumps(self._measured).encode())]
        if self._group.rank != 0:
            return
        rows = memory_rows(self._config, self._vocabulary_size, self._group.device)
        if len(gathered) == 1:  # all ranks are one process
            rows = [_together(rows)]
        with writing(directory):
            write_memory(directory, [_measured(row, gathered[row.process]) for row in rows])


def _together(rows: list[MemoryRow]) -> MemoryRow:
    kinds = {kind: sum(row.predicted[kind] or 0.0 for row in rows) for kind in rows[0].predicted}
    return MemoryRow(process=0, replica=0, rank=0, predicted=kinds, measured={})


def _measured(row: MemoryRow, measured: dict[str, float | None]) -> MemoryRow:
    return MemoryRow(
        process=row.process, replica=row.replica, rank=row.rank, predicted=row.predicted, measured=measured
    )
