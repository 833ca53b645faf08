"""`MemoryProbe`: measures the memory of a run at its peak, by kind."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import Tensor

from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.plan.memory import MemoryRow, write_memory
from pipeloom.train.config.memory import memory_rows, unpredicted_rows
from pipeloom.train.output.directory import writing
from pipeloom.train.run_model import blocks_of
from pipeloom.train.run_parts import RunParts

LOOKED_AT = 2  # first steps whose memory is measured: the second has optimizer states and warm caches


class MemoryProbe:
    """Measures memory in the first steps of a run."""

    def __init__(self, parts: RunParts) -> None:
        self._parts, self._pipe = parts, parts.pipeline
        self._measured: dict[str, float | None] = {}
        self._rows: list[MemoryRow] = []  # the prediction, once it was written

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step, the `number`-th of this process."""
        if number >= LOOKED_AT:
            yield
            return
        kept = SavedBytes.beyond(*self._pipe.modules())
        self._pipe.memory.record_peaks()
        with kept.counting():
            yield
        self._pipe.memory.record_peaks(False)
        # Offload has hooks of its own, and what waits from I to W is kept by no hook.
        elsewhere = self._parts.config.memory.offload_activations is not None or self._parts.schedule.split_backwards
        self._measured["activations"] = None if elsewhere else kept.peak

    def look(self, number: int) -> None:
        """Between the backwards of the `number`-th step and its update."""
        if number >= LOOKED_AT:
            return
        held, peak = self._pipe.memory.held_bytes(), self._pipe.memory.peak_bytes()
        self._measured |= {
            "parameters": held.parameters,
            "masters": held.masters,
            "gradients": peak.gradients,
            "gathered": peak.gathered,
            "buffers": sum(buffer.nbytes for stage in self._pipe.modules() for buffer in stage.buffers()),
        }

    def write(self, *, needed: bool) -> None:
        """Write the file on process 0; every process calls it, after the steps that are looked at and at the end.

        Args:
            needed: whether an error, such as a full disk, ends the run.
        """
        parts = self._parts
        states = (value for state in parts.optimizer.state.values() for value in state.values())
        sizes = [value.nbytes for value in states if isinstance(value, Tensor) and value.dim()]
        self._measured["optimizer"] = sum(sizes) - getattr(parts.optimizer, "offloaded_bytes", 0)
        if torch.cuda.is_available():
            self._measured["peak"] = torch.cuda.max_memory_allocated()
        gathered = parts.group.gather_json(self._measured)
        if parts.group.rank != 0:
            return
        rows = self._rows = self._rows or self._predicted()
        with writing(parts.output_dir) if needed else suppress(OSError):
            write_memory(parts.output_dir, [replace(row, measured=gathered[row.process]) for row in rows])

    def _predicted(self) -> list[MemoryRow]:
        """A row per process, with nothing measured."""
        parts, config = self._parts, self._parts.config
        if config.parallel.cut == "time":
            config = config.changed("parallel", cut=",".join(map(str, blocks_of(parts.stages))))
        if config.model.pretrained is not None:
            rows = unpredicted_rows(config)
        else:
            rows = memory_rows(config, parts.samples.tokenizer.vocabulary_size, parts.group.device.type)
        if parts.group.size == 1:  # all ranks are one process
            kinds = rows[0].predicted
            together = {
                kind: None if kinds[kind] is None else sum(row.predicted[kind] or 0.0 for row in rows) for kind in kinds
            }
            rows = [replace(rows[0], predicted=together)]
        return rows
