"""`computing_seconds`: how long the ranks of a process computed in a step, without waits for a core."""

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.ir import Action, Op
from pipeloom.train.output.step_metrics import COMPUTATIONS, Records
from pipeloom.training import Pipeline

_THREADS = Path("/proc/self/task")
_MOST_BYTES = 100  # of three numbers


class CoreWaits:
    """How long the threads of this process were ready to run and had no core.

    Linux counts this for each thread (``/proc/self/task/*/schedstat``); elsewhere it is 0. It is read in each step, so
    without `Path`, which takes four times as long.
    """

    def __init__(self, threads: Path = _THREADS) -> None:
        self._threads = threads
        self._before = self._read()

    def seconds(self) -> float:
        """The most that any thread waited for a core since the last call."""
        before, self._before = self._before, self._read()
        return max((value - before.get(thread, 0.0) for thread, value in self._before.items()), default=0.0)

    def _read(self) -> dict[str, float]:
        found = {}
        for name in os.listdir(self._threads) if self._threads.is_dir() else ():
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or this system does not count it
                file = os.open(f"{self._threads}/{name}/schedstat", os.O_RDONLY)
                try:
                    found[name] = int(os.read(file, _MOST_BYTES).split()[1]) / 1e9
                finally:
                    os.close(file)
        return found


def computing_seconds(
    pipeline: Pipeline, records: Records, slots: int, place: int, core_waits: Callable[[], float]
) -> Tensor:
    """Seconds of forwards and of backwards of this process in a step, in its slot; its ranks' if it has all ranks.

    Each is the sum over stages and slices of the lower quartile over micro-batches times their number: what hits some
    of them alone does not count. Time that a rank waited for a core does not count either: it is no slower for it.

    Args:
        pipeline, records: of the step.
        slots: number of processes, or of the ranks of a process that has all of them.
        place: the slot of this process.
        core_waits: the seconds that threads of this process waited for a core since it was called last.

    Returns:
        Shape [2, slots], float64.
    """
    found = torch.zeros(2, slots, dtype=torch.float64)
    own = {rank: _own_seconds(pipeline, rank, rows) for rank, rows in records}
    without_core = math.fsum(each.seconds - each.on_core for computations in own.values() for each in computations)
    counted = 1.0  # the part of the time without a core that the ranks chose, such as a sleep
    if without_core > 0:  # never on GPUs; else in each step, so that these are the waits of this one
        counted -= min(1.0, core_waits() / without_core)
    for rank, computations in own.items():
        durations: dict[tuple[int, Op, int], list[float]] = {}
        for each in computations:
            key = (each.action.stage, each.action.op, each.action.slice or 0)
            durations.setdefault(key, []).append(each.on_core + counted * (each.seconds - each.on_core))
        for (_, op, _), seconds in durations.items():
            quartile = sorted(seconds)[(len(seconds) - 1) // 4]
            found[int(op is not Op.F), place if len(own) == 1 else rank] += quartile * len(seconds)
    return found


class _Computation(NamedTuple):
    """Seconds of one computation without its waits for overlapped work, and those of them on a core."""

    action: Action
    seconds: float
    on_core: float


def _own_seconds(pipeline: Pipeline, rank: int, rows: Sequence[tuple[Action, float, float]]) -> list[_Computation]:
    waits, processor = pipeline.waits[rank], pipeline.processor_seconds[rank]
    found = []
    for action, start, end in rows:
        if action.op in COMPUTATIONS:
            seconds = end - start - waits.get(action, 0.0)
            found.append(_Computation(action, seconds, min(seconds, processor.get(action, seconds))))
    return found
