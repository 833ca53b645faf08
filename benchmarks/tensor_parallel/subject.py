"""What runs in each process: builds a system, compares it with the reference, and takes its steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from benchmarks.tensor_parallel.layouts import GridTensor
from benchmarks.tensor_parallel.systems import DTensorModel, OneProcess, PipeloomTensor, collective_seconds, peak_bytes
from safetensors.torch import load_file

KINDS: dict[str, Any] = {
    "one process": OneProcess,
    "pipeloom": PipeloomTensor,
    "dtensor": DTensorModel,
    "layout": GridTensor,
}


class Entry(NamedTuple):
    """A system under test.

    Attributes:
        processes, threads: number of processes, and of torch's threads in each.
        kind: of `KINDS`.
        options: of its class.
        crew: systems with the same name of a crew share its processes; "": its own.
    """

    processes: int
    threads: int
    kind: str
    options: dict[str, Any]
    crew: str = ""


class Built(NamedTuple):
    """What a rank says of its first steps.

    Attributes:
        errors: of the loss and each gradient, relative to the largest element.
        kept_bytes: peak bytes that autograd kept.
        sent_bytes: in one step's collectives inside stages, by axis. Empty where the system does not count.
        calls: collectives of one step.
    """

    errors: dict[str, float]
    kept_bytes: int
    sent_bytes: dict[str, int]
    calls: int


class Step(NamedTuple):
    """One step of a rank: start and end by a clock that all ranks share, CPU time, seconds inside collectives."""

    start: float
    end: float
    cpu: float
    waited: float


class Subject:
    """One rank of a crew; it holds one or several systems."""

    def __init__(self, rank: int) -> None:
        self._systems: dict[str, Any] = {}

    def build(self, name: str, entry: Entry, sizes: Any, reference: str) -> Built:
        system = self._systems[name] = KINDS[entry.kind](sizes, **entry.options)
        kept = peak_bytes(system)  # this step also allocates, connects, and infers shapes
        _zero(system)
        mesh = getattr(system, "mesh", None)
        if mesh is not None:
            mesh.meter.traffic.clear()
        loss = system.step()
        sent: dict[str, int] = {}
        calls = 0
        for (axis, _), traffic in mesh.meter.traffic.items() if mesh is not None else ():
            sent[axis] = sent.get(axis, 0) + traffic.num_bytes
            calls += traffic.calls
        return Built(_errors(system, loss, Path(reference)), kept, sent, calls)

    def run_steps(self, name: str, count: int) -> list[Step]:
        """`count` steps, each after a barrier and from zero gradients."""
        found, system = [], self._systems[name]
        for _ in range(count):
            _zero(system)
            if dist.is_initialized():
                dist.barrier()
            waited, cpu, start = system.waited(), time.process_time(), time.monotonic()
            system.step()
            end = time.monotonic()
            found.append(Step(start, end, time.process_time() - cpu, system.waited() - waited))
        return found

    def profiled(self, name: str) -> float:
        """Seconds of one step inside torch's collectives."""
        _zero(self._systems[name])
        dist.barrier()
        return collective_seconds(self._systems[name].step)

    def forget(self) -> None:
        """Close all systems."""
        for system in self._systems.values():
            system.close()
        self._systems.clear()

    def close(self) -> None:
        self.forget()


def _zero(system: Any) -> None:
    for parameter in system.parameters.values():
        parameter.grad = None


def _errors(system: Any, loss: Any, reference: Path) -> dict[str, float]:
    expected = load_file(reference)
    errors = {}
    if loss is not None:
        errors["loss"] = abs(float(loss) - float(expected["loss"])) / abs(float(expected["loss"]))
    for name, gradient, cut in system.gradients():
        largest = float(expected[name].abs().max().clamp_min(1e-30))
        wanted = cut(expected[name])
        missing = gradient is None or gradient.shape != wanted.shape
        errors[name] = float("inf") if missing else float((gradient - wanted).abs().max()) / largest
    return errors
