"""`pl.Pipe` beside torchgpipe and the plain model, in one process: gradients, then the time of a step."""

from __future__ import annotations

import copy
import gc
import importlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from benchmarks.common.report import Parts, table
from benchmarks.common.statistics import Spread, ratio, spread
from torch import Tensor, nn

import pipeloom as pl

BATCH, CHUNKS = 64, 8
CHECKPOINT = ("never", "except_last")


class Shape(NamedTuple):
    """A chain of equal blocks: its name, the width of the blocks, and the shape of a sample."""

    name: str
    width: int
    sample: tuple[int, ...]

    def model(self) -> nn.Sequential:
        """Eight blocks, so that two partitions have equal work."""
        if len(self.sample) == 1:
            blocks = [nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh()) for _ in range(8)]
        else:
            blocks = [nn.Sequential(nn.Conv2d(self.width, self.width, 3, padding=1), nn.ReLU()) for _ in range(8)]
        return nn.Sequential(*blocks)


SHAPES = (
    Shape("linear 1024", 1024, (1024,)),
    Shape("linear 64", 64, (64,)),
    Shape("conv 32 x 32", 16, (16, 32, 32)),
)


def systems(model: nn.Sequential, checkpoint: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """The plain model, `pl.Pipe`, and torchgpipe where it is installed; each with its own parameters."""
    balance, devices = [4, 4], ["cpu", "cpu"]
    options: dict[str, Any] = {"devices": devices, "chunks": CHUNKS, "checkpoint": checkpoint}
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": copy.deepcopy(model),
        "pl.Pipe": pl.Pipe(copy.deepcopy(model), balance, **options),
    }
    try:
        peer = importlib.import_module("torchgpipe")
    except ImportError:
        return found
    return {**found, "torchgpipe": peer.GPipe(copy.deepcopy(model), balance, **options)}


def step(system: Any, inputs: Tensor) -> float:
    """Seconds of a forward, a loss and a backward."""
    for parameter in system.parameters():
        parameter.grad = None
    begin = time.perf_counter()
    system(inputs).square().mean().backward()
    return time.perf_counter() - begin


def differences(found: dict[str, Any], inputs: Tensor) -> dict[str, float]:
    """The largest difference of a gradient from the plain model's, relative to the largest gradient, in float64."""
    gradients = {}
    for name, system in found.items():
        twin = system.double()
        step(twin, inputs.double())
        gradients[name] = [parameter.grad.clone() for parameter in twin.parameters()]
        system.float()
    plain = gradients.pop("plain")
    scale = max(float(each.abs().max()) for each in plain)
    return {
        name: max(float((one - other).abs().max()) for one, other in zip(each, plain, strict=True)) / scale
        for name, each in gradients.items()
    }


def measure(rounds: int, steps: int) -> dict[str, Any]:
    """Differences and seconds per step by shape, checkpoint mode and system."""
    results: dict[str, Any] = {}
    for shape in SHAPES:
        for checkpoint in CHECKPOINT:
            torch.manual_seed(0)
            found = systems(shape.model(), checkpoint)
            inputs = torch.randn(BATCH, *shape.sample)
            apart = differences(found, inputs)
            for name, each in apart.items():
                if each > 1e-12:
                    raise SystemExit(f"{name}, {shape.name}, {checkpoint}: gradients differ by {each:.1e}.")
            seconds: dict[str, list[float]] = {name: [] for name in found}
            for system in found.values():
                step(system, inputs)
            for _ in range(rounds):
                for name, system in found.items():
                    gc.collect()
                    seconds[name].append(min(step(system, inputs) for _ in range(steps)))
            results[f"{shape.name}, {checkpoint}"] = {"differences": apart, "seconds": seconds}
    return results


def tables(results: dict[str, Any]) -> Parts:
    """One row per shape and checkpoint mode."""
    rows = []
    for name, found in results.items():
        seconds = found["seconds"]
        peer = seconds.get("torchgpipe")
        row: list[object] = [name, *(spread(seconds[each]).show("{:.1f}", 1e3) for each in ("plain", "pl.Pipe"))]
        row += [spread(peer).show("{:.1f}", 1e3), ratio(seconds["pl.Pipe"], peer).show()] if peer else ["", ""]
        rows.append([*row, f"{max(found['differences'].values()):.0e}"])
    header = ["model, checkpoint", "plain", "pl.Pipe", "torchgpipe", "pl.Pipe / torchgpipe", "gradients apart"]
    note = (
        f"`pl.Pipe` beside torchgpipe: milliseconds per step on two CPU partitions, {torch.get_num_threads()} threads, "
        f"batch {BATCH}, {CHUNKS} micro-batches; the fastest of a few steps per round, median (quartiles) over rounds. "
        "torchgpipe runs partitions on the CPU one after another."
    )
    return [note, table(header, rows)]


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Step time of `pl.Pipe` over that of torchgpipe."""
    return {
        f"pl.Pipe / torchgpipe: {name}": ratio(found["seconds"]["pl.Pipe"], found["seconds"]["torchgpipe"])
        for name, found in results.items()
        if "torchgpipe" in found["seconds"]
    }
