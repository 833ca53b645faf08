"""One process of a stage: a GPT whose layers or sequences are shared, on emulated devices or on real cores."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from benchmarks.common.processes import run_first
from benchmarks.inside_stage.device import Device, DeviceTransport, EmulatedAxis, LocalAxis, OtherAxes
from torch import Tensor

import pipeloom as pl
from pipeloom.ir import Op, Schedule
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_forms import ChannelAxis
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.processes.members import current_members
from pipeloom.transport.shared_memory import SharedMemoryTransport


class Work(NamedTuple):
    """A model, its batch and how processes share it.

    Attributes:
        config: of the model.
        samples: per micro-batch.
        schedule: of a step.
        inside: the processes of a stage.
    """

    config: GPTConfig
    samples: int
    schedule: Schedule
    inside: InsideStage

    def model(self) -> GPT:
        model = GPT(self.config)
        init_parameters(model, seed=0)
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        config, count = self.config, self.samples * self.schedule.num_microbatches
        generator = torch.Generator().manual_seed(11)
        tokens = torch.randint(config.vocabulary_size, (count, config.sequence_length + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


def reference_losses(work: Work, updates: int) -> list[float]:
    """Losses of plain SGD by one process."""
    model, (inputs, targets), losses = work.model(), work.batch(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(updates):
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


LEARNING_RATE = 0.5


class Subject:
    """One process.

    Args:
        work: what it does.
        device: operations per second and link of the emulated device; None: computations run on a core.
    """

    def __init__(self, rank: int, work: Work, device: tuple[float, LinkRate] | None) -> None:
        self._work, self._device = work, None if device is None else Device(*device)
        self._batch = work.batch()
        self._pipes: dict[str, pl.Pipeline] = {}
        self._meshes: dict[str, pl.Mesh] = {}

    def build(self, name: str) -> None:
        """Make the pipeline `name`: "real", or "local", whose collectives send nothing."""
        work, device = self._work, self._device
        inside, degrees = work.inside, {"tp": work.inside.tensor, "cp": work.inside.context}

        def wrap(axis: Axis, line: Sequence[int]) -> Axis:
            if name == "local":
                return LocalAxis(axis.name, axis.degree, axis.index)
            if device is None:
                return axis
            clocks.open(ChannelAxis.channels_between(line))
            between = ChannelAxis("clocks", clocks, line, axis.index, copies=False)
            return EmulatedAxis(axis, between, device)

        clocks = SharedMemoryTransport(dist.get_rank(), current_members().gather)
        mesh = OtherAxes(wrap, pp=work.schedule.num_ranks, **degrees)
        model: Any = work.model()
        if inside.tensor > 1:
            model = pl.parallelize(model, mesh, layout=inside.layout, depth=inside.depth, sequence=inside.sequence)
        transport: Any = "auto"
        if device is not None:
            inner = SharedMemoryTransport(mesh.coordinate("pp"), mesh.members.gather, processes=mesh.line("pp"))
            transport = DeviceTransport(inner, device)
        self._meshes[name] = mesh
        self._pipes[name] = pl.Pipeline(
            model,
            work.schedule,
            loss_fn=loss_fn,
            mesh=mesh,
            context=inside.context_kind if inside.context > 1 else None,
            transport=transport,
        )

    def losses(self, updates: int) -> list[float]:
        """Losses of plain SGD."""
        pipe, losses = self._pipes["real"], []
        optimizer = torch.optim.SGD(pipe.parameters(), lr=LEARNING_RATE)
        for _ in range(updates):
            optimizer.zero_grad()
            losses.append(float(pipe.step(*self._batch)))
            optimizer.step()
        return losses

    def step(self, name: str) -> tuple[float, float]:
        """Start and end of a step, by a clock that all processes share."""
        pipe, device = self._pipes[name], self._device
        for parameter in pipe.parameters():
            parameter.grad = None
        members = self._meshes[name].members
        members.gather(b"")
        start = max(float(each) for each in members.gather(repr(time.monotonic()).encode()))
        if device is not None:
            device.begin(start)
        with device or nullcontext():
            pipe.step(*self._batch)
        if device is not None:
            device.finish()
        return start, time.monotonic()

    def action_seconds(self, name: str) -> dict[str, float]:
        """Mean seconds of the forwards and backwards of the last step."""
        ((_, rows),) = self._pipes[name].records
        return {str(op): fmean(end - start for action, start, end in rows if action.op is op) for op in (Op.F, Op.B)}

    def sent(self) -> dict[tuple[str, str], tuple[int, int, float]]:
        """Calls, bytes and seconds of collectives so far."""
        meter = self._meshes["real"].meter
        return {key: (each.calls, each.num_bytes, each.seconds) for key, each in meter.traffic.items()}

    def collective_seconds(self, axis_name: str, collective: str, sizes: list[int], count: int) -> list[list[float]]:
        """Seconds of single calls on otherwise idle processes.

        Args:
            sizes: bytes that a call counts.
            count: calls per size.
        """
        axis = self._meshes["real"].axis(axis_name)
        found = []
        for size in sizes:
            call = _caller(axis, collective, size)
            seconds = []
            for number in range(count + 3):
                axis.all_reduce(torch.zeros(1))  # together
                start = time.perf_counter()
                call()
                if number >= 3:
                    seconds.append(time.perf_counter() - start)
            found.append(seconds)
        return found

    def run_first(self) -> bool:
        """Run before other work of the machine, where allowed: real-time on an emulated device, else by niceness."""
        threads = [int(thread) for thread in os.listdir("/proc/self/task")]
        if self._device is not None:
            return all(run_first(thread) for thread in threads)
        try:
            for thread in threads:
                os.setpriority(os.PRIO_PROCESS, thread, -20)
        except OSError:
            return False
        return True

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for mesh in self._meshes.values():
            mesh.close()


def _caller(axis: Axis, collective: str, size: int) -> Any:
    """A call of the collective that counts about `size` bytes."""
    degree = axis.degree
    per_element = {"all_reduce": 2 * (degree - 1) / degree, "all_gather": degree - 1}
    per_element |= dict.fromkeys(("reduce_scatter", "all_to_all"), (degree - 1) / degree)
    elements = max(1, int(size / per_element.get(collective, 1) / 4 / degree)) * degree
    x = torch.zeros(elements)
    match collective:
        case "all_to_all":
            return lambda: axis.all_to_all(list(x.chunk(degree)))
        case "broadcast":
            return lambda: axis.broadcast(x, 0)
        case "reduce":
            return lambda: axis.reduce(x, 0)
        case "shift":
            return lambda: axis.shift([x])()  # noqa: PLW0108  # begun in each call
        case _:
            return lambda: getattr(axis, collective)(x)
