"""Time of one all-reduce between two processes: pipeloom's axis, gloo, and the bound of memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, table
from benchmarks.common.statistics import ratio, spread
from torch import Tensor

import pipeloom as pl
from pipeloom.processes.host_memory import keep_freed_memory

AXIS, GLOO, BOUND = "pipeloom", "gloo", "copy and sum"
KINDS = (AXIS, GLOO, BOUND)
SIZES = tuple(1 << exponent for exponent in range(12, 23))  # bytes


class Collectives:
    """One rank of the crew."""

    def __init__(self, rank: int) -> None:
        keep_freed_memory()  # as a pipeline does
        self._mesh = pl.Mesh(tp=dist.get_world_size())
        self._axis = self._mesh.axis("tp")

    def check(self) -> float:
        """The largest difference between the sums."""
        x = torch.randn(100_001, generator=torch.Generator().manual_seed(self._axis.index))
        return float((self._axis.all_reduce(x) - self._gloo(x)).abs().max())

    def _gloo(self, x: Tensor) -> Tensor:
        found = x.clone()
        dist.all_reduce(found)
        return found

    def run(self, kind: str, num_bytes: int, count: int) -> float:
        """Median seconds of a call."""
        x, y = torch.randn(2, num_bytes // 4).unbind()
        calls: dict[str, Callable[[], Any]] = {
            AXIS: lambda: self._axis.all_reduce(x),
            GLOO: lambda: self._gloo(x),
            BOUND: lambda: y.copy_(x) + x,
        }
        call, seconds = calls[kind], []
        dist.barrier()
        for _ in range(count):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return spread(seconds[count // 4 :]).median

    def close(self) -> None:
        self._mesh.close()


def measure(rounds: int, count: int = 60) -> dict[str, Any]:
    results: dict[str, Any] = {str(size): {kind: [] for kind in KINDS} for size in SIZES}
    with Crew("collectives", 2, Collectives) as crew:
        error = max(crew.call("check"))
        if error:
            raise SystemExit(f"sums differ by {error:.1e}")
        for number in range(1 + rounds):
            for size in SIZES:
                for kind in KINDS:
                    found = max(crew.call("run", kind, size, count))
                    if number:  # the first warms up
                        results[str(size)][kind].append(found)
    return results


def tables(results: dict[str, Any]) -> Parts:
    rows = []
    for size, result in results.items():
        times = (spread(result[kind]).show("{:.0f}", 1e6) for kind in KINDS)
        rows.append((f"{int(size) >> 10}", *times, ratio(result[AXIS], result[GLOO]).show()))
    header = ("KiB", *(f"{kind}: µs" for kind in KINDS), "pipeloom / gloo")
    return ["### All-reduce between two processes", table(header, rows)]
