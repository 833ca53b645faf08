"""`computing_seconds`: how long the ranks of a process computed in a step, without waits for a core."""

import math
import os
import threading
from collections.abc import Callable, Collection, Sequence
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
    """How long the threads that compute were ready to run and had no core.

    These are the threads that run the ranks, and those that torch has started from them for parallel operations. Such
    threads are not Python's, and have the name of the thread that started them, unlike those of torch.distributed.
    Python's other threads, such as that of a background save, may wait while a rank sleeps.

    Linux counts waits for each thread (``/proc/self/task/*/schedstat``); elsewhere they are 0. They are read in each
    step, so without `Path`, which takes four times as long.
    """

    def __init__(self, threads: Path = _THREADS) -> None:
        self._threads = threads
        self._names: dict[str, bytes] = {}
        self._before: dict[str, float] = {}

    def seconds(self, ranks: Collection[int]) -> float:
        """The most that any of these threads waited for a core since the last call; 0 for threads new since then.

        Args:
            ranks: native numbers of the threads that run the ranks of this process.
        """
        before, self._before = self._before, self._read({str(thread) for thread in ranks})
        return max((value - before.get(thread, value) for thread, value in self._before.items()), default=0.0)

    def _read(self, ranks: set[str]) -> dict[str, float]:
        listed = os.listdir(self._threads) if self._threads.is_dir() else []
        others = {str(thread.native_id) for thread in threading.enumerate()} - ranks
        self._names = {thread: self._names.get(thread) or self._file(thread, "comm") for thread in listed}
        names = {self._names.get(thread) for thread in ranks}
        found = {}
        for thread in listed:
            if thread not in others and self._names[thread] in names:
                with suppress(ValueError, IndexError):  # the thread has ended, or this system does not count it
                    found[thread] = int(self._file(thread, "schedstat").split()[1]) / 1e9
        return found

    def _file(self, thread: str, name: str) -> bytes:
        """The content of a short file about a thread; empty where there is none."""
        with suppress(OSError):
            file = os.open(f"{self._threads}/{thread}/{name}", os.O_RDONLY)
            try:
                return os.read(file, _MOST_BYTES)
            finally:
                os.close(file)
        return b""


def computing_seconds(
    pipeline: Pipeline, records: Records, slots: int, place: int, core_waits: Callable[[Collection[int]], float]
) -> Tensor:
    """Seconds of forwards and of backwards of this process in a step, in its slot; its ranks' if it has all ranks.

    Each is the sum over stages and slices of the lower quartile over micro-batches times their number: what hits some
    of them alone does not count. Time that a rank waited for a core does not count either: it is no slower for it.

    Args:
        pipeline, records: of the step.
        slots: number of processes, or of the ranks of a process that has all of them.
        place: the slot of this process.
        core_waits: the seconds that the threads of ranks waited for a core since it was called last.

    Returns:
        Shape [2, slots], float64.
    """
    found = torch.zeros(2, slots, dtype=torch.float64)
    own = {rank: _own_seconds(pipeline, rank, rows) for rank, rows in records}
    without_core = math.fsum(each.seconds - each.on_core for computations in own.values() for each in computations)
    counted = 1.0  # the part of the time without a core that the ranks chose, such as a sleep
    if without_core > 0:  # never on GPUs; else in each step, so that these are the waits of this one
        counted -= min(1.0, core_waits(pipeline.threads.values()) / without_core)
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
