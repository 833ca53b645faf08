"""One process of a case: measures layers, and steps of every configuration."""

from __future__ import annotations

import gc
import os
import sys
import time
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from benchmarks.plan_local.peak import peak_of

import pipeloom as pl
from pipeloom.models import GPTConfig
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.local.layer_times import LayerTimes
from pipeloom.plan.local.measured import Rates
from pipeloom.plan.local.references import Shape
from pipeloom.train.machine.layers import measure_layers
from pipeloom.train.machine.reference_steps import ConfiguredRun, measure_references
from pipeloom.transport import shared_block

_FIRST_STEPS = 4  # which make the optimizer's states, and compare the loss with those of a few samples
_MEASURED_STEPS = 4  # whose memory is measured: how many messages wait for a replica depends on the moment


class Trainer:
    """The subject of a crew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[str, ConfiguredRun] = {}
        self._mesh: pl.Mesh | None = None

    def layers(self, config: GPTConfig, samples: list[int], rates: Rates, side_by_side: int) -> LayerTimes | None:
        """The layers of a model; so many processes measure at the same time."""
        found = None
        if self._rank < side_by_side:
            found = measure_layers(config, samples, precision=pl.Precision("fp32"), rates=rates)
        dist.barrier()
        return found

    def references(self, config: GPTConfig, batch: int, shapes: list[Shape]) -> dict[str, Any]:
        """Steps of some shapes of the mesh ("found"), and the CPU time of `_Use`."""
        use = _Use()
        found = measure_references(config, batch, precision=pl.Precision("fp32"), shapes=shapes, passes=1)
        return {"found": found, **use.end()}

    def build(self, name: str, config: GPTConfig, of: Configuration) -> None:
        """The pipeline and the optimizer of a configuration; those built at the same time have the same degrees."""
        if self._mesh is None:  # one at a time: the threads of its process groups wake up a hundred times per second
            self._mesh = pl.Mesh(pp=of.pipeline, dp=of.data, tp=of.inside.tensor)
        self._made[name] = ConfiguredRun(config, of, self._mesh)

    def steps(self, name: str, warm_up: int, count: int) -> dict[str, Any]:
        """Seconds of `count` steps, from a barrier to the end of the update, after those for warm-up.

        And the CPU time of `_Use`, warm-up included.
        """
        run, found = self._made[name], list[float]()
        dist.barrier()
        use = _Use()
        for number in range(warm_up + count):
            dist.barrier()
            start = time.perf_counter()
            run.step()
            end = time.perf_counter()
            if number >= warm_up:
                found.append(end - start)
        return {"steps": found, **use.end()}

    def memory(self, name: str) -> int:
        """Most bytes at once: parameters, optimizer states, messages to replicas, and what one of some steps allocates.

        Messages between stages that lie in shared memory until they are used count where they are used.
        """
        run = self._made[name]
        assert self._mesh is not None
        for _ in range(_FIRST_STEPS):
            run.step()
        held = run.pipeline.memory.held_bytes()
        states = (value for state in run.optimizer.state.values() for value in state.values())
        always = held.parameters + held.masters + sum(value.nbytes for value in states if value.dim())
        gc.collect()
        with patch.object(shared_block, "_COPIED_BYTES", sys.maxsize):  # so they are in memory of torch
            return always + max(peak_of(run.step) + self._mesh.message_bytes for _ in range(_MEASURED_STEPS))

    def close_all(self) -> None:
        """End all pipelines and their mesh."""
        for run in self._made.values():
            run.pipeline.close()
        self._made.clear()
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        gc.collect()


class _Use:
    """Seconds that pass, CPU seconds of this process, and those of the machine."""

    def __init__(self) -> None:
        self._begun = self._now()

    def end(self) -> dict[str, float]:
        """Since this was made."""
        return {name: now - begun for (name, begun), now in zip(self._begun.items(), self._now().values(), strict=True)}

    @staticmethod
    def _now() -> dict[str, float]:
        return {"whole": time.perf_counter(), "own": time.process_time(), "machine": _machine_seconds()}


def _machine_seconds() -> float:
    """CPU seconds of all processes of this machine so far, and those that its host took away."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, soft_irq, stolen = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
