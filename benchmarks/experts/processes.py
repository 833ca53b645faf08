"""Part `processes`: experts shared by two processes, by pipeloom and by DeepSpeed, without a pipeline."""

from __future__ import annotations

import importlib.util
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.common.processes import Crew
from benchmarks.common.reference import TOLERANCE
from benchmarks.common.report import Parts, Table, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.experts.systems import Sizes, System, layers
from torch import Tensor

import pipeloom as pl
from pipeloom.processes.host_memory import keep_freed_memory

PROCESSES = 2
SIZES = {
    "width 256, 4 x 256 tokens each": Sizes(width=256, samples=8),
    "width 256, 1 x 256 tokens each": Sizes(width=256, samples=2),
}
SYSTEMS = ("experts on each", "pipeloom ep=2", "deepspeed ep=2")


class Step(NamedTuple):
    """One step of a process: start and end by a clock that all share, CPU seconds, seconds inside all-to-alls."""

    start: float
    end: float
    cpu: float
    exchanged: float


class Subject:
    """One process of a crew, with its part of the samples."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._mesh: Any = None
        torch.set_num_threads(1)
        keep_freed_memory()

    def build(self, name: str, sizes: Sizes) -> tuple[float, Tensor]:
        """Loss of this process, and the gradient of the embedding, without declared losses."""
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        if name.startswith("deepspeed"):
            self._system = layers(sizes, "deepspeed ep")
        else:
            self._system = layers(sizes, "pipeloom")
        if name == "pipeloom ep=2":
            self._mesh = pl.Mesh(dp=PROCESSES, ep=PROCESSES)
            self._system.model = pl.parallelize(self._system.model, self._mesh, {"blocks.*.inner": "experts"})
            self._system = System(self._system.model, sizes)
        self._system.take_part(self._rank, PROCESSES)
        loss = self._system.step(declared=False)
        gradient = next(self._system.model.parameters()).grad
        assert gradient is not None
        return float(loss), gradient

    def run_steps(self, count: int) -> list[Step]:
        found = []
        for _ in range(count):
            dist.barrier()
            exchanged, cpu, start = self._exchanged(), time.process_time(), time.monotonic()
            self._system.step()
            end = time.monotonic()
            found.append(Step(start, end, time.process_time() - cpu, self._exchanged() - exchanged))
        return found

    def _exchanged(self) -> float:
        return 0.0 if self._mesh is None else sum(each.seconds for each in self._mesh.meter.traffic.values())

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()


def measure(sizes: Sizes, rounds: int, steps: int = 2) -> dict[str, dict[str, list[float]]]:
    """Seconds, CPU seconds of all processes, and share of all-to-alls in the time of the slower process."""
    names = [name for name in SYSTEMS if "deepspeed" not in name or importlib.util.find_spec("deepspeed")]
    whole = layers(sizes, "pipeloom")
    loss, gradient = float(whole.step(declared=False)), next(whole.model.parameters()).grad
    assert gradient is not None
    results: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        crews = {name: stack.enter_context(Crew(name, PROCESSES, Subject)) for name in names}
        for name, crew in crews.items():
            answers = crew.call("build", name, sizes)
            mean = sum(answer[1] for answer in answers) / PROCESSES
            error = max(
                abs(sum(answer[0] for answer in answers) / PROCESSES - loss) / loss,
                float((mean - gradient).abs().max() / gradient.abs().max()),
            )
            if not error <= TOLERANCE:
                raise SystemExit(f"{name} differs by {error:.1e}, more than {TOLERANCE:.0e}: nothing was timed.")
            results[name] = {"seconds": [], "cpu": [], "exchanged": []}
        for _ in range(rounds):
            for name, crew in crews.items():
                taken = list(zip(*crew.call("run_steps", 1 + steps), strict=True))[1:]
                found = results[name]
                found["seconds"].append(spread([max(s.end for s in t) - min(s.start for s in t) for t in taken]).median)
                found["cpu"].append(spread([sum(s.cpu for s in t) for t in taken]).median)
                found["exchanged"].append(
                    spread([max(s.exchanged / (s.end - s.start) for s in t) for t in taken]).median
                )
    return results


def tables(results: dict[str, dict[str, dict[str, list[float]]]]) -> Parts:
    parts: list[str | Table] = []
    header = (
        "experts",
        "ms per micro-batch",
        "CPU ms, both processes",
        "CPU / experts on each",
        "share of all-to-alls",
    )
    for label, found in results.items():
        parts.append(f"### processes: {label}")
        rows = [
            (
                name,
                spread(each["seconds"]).show("{:.1f}", 1e3),
                spread(each["cpu"]).show("{:.1f}", 1e3),
                ratio(each["cpu"], found["experts on each"]["cpu"]).show("{:.3f}"),
                spread(each["exchanged"]).show("{:.1%}") if name.startswith("pipeloom") else "",
            )
            for name, each in found.items()
        ]
        parts.append(table(header, rows))
    return parts


def headlines(results: dict[str, dict[str, dict[str, list[float]]]]) -> dict[str, Spread]:
    """Ratios for the README."""
    found = {}
    for label, each in results.items():
        mine = each["pipeloom ep=2"]
        found[f"processes, {label}: share of all-to-alls"] = spread(mine["exchanged"])
        found |= {
            f"processes, {label}: pipeloom ep=2 / {name}, {what}": ratio(mine[what], each[name][what])
            for name in each
            for what in ("seconds", "cpu")
            if name != "pipeloom ep=2"
        }
    return found
