"""One process of a case: measures layers, and steps of every configuration."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.plan_local.peak import peak_of

import pipeloom as pl
from pipeloom import schedules
from pipeloom.models import GPT, GPTConfig, loss_fn, materialize
from pipeloom.parallel.tensor.parallelize import parallelize
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.local.layer_times import LayerTimes
from pipeloom.plan.local.measured import Rates
from pipeloom.split import split
from pipeloom.train.machine.layers import measure_layers
from pipeloom.training import BarrierStep


class Trainer:
    """The subject of a crew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[str, tuple[pl.Pipeline, BarrierStep, Any]] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._mesh: pl.Mesh | None = None

    def layers(self, config: GPTConfig, samples: list[int], rates: Rates, side_by_side: int) -> LayerTimes | None:
        """The layers of a model; so many processes measure at the same time."""
        found = None
        if self._rank < side_by_side:
            found = measure_layers(config, samples, precision=pl.Precision("fp32"), rates=rates)
        dist.barrier()
        return found

    def build(self, name: str, config: GPTConfig, of: Configuration) -> None:
        """The pipeline and the optimizer of a configuration; those built at the same time have the same degrees."""
        if self._mesh is None:  # one at a time: the threads of its process groups wake up a hundred times per second
            self._mesh = pl.Mesh(pp=of.pipeline, dp=of.data, tp=of.inside.tensor)
        mesh = self._mesh
        schedule = pl.schedules.build(
            of.schedule,
            num_ranks=of.pipeline,
            num_microbatches=of.microbatches,
            num_chunks=None if of.chunks == 1 or schedules.find(of.schedule).chunks else of.chunks,
        )
        with torch.device("meta"):
            model = GPT(config)
        if of.inside.tensor > 1:
            parallelize(model, mesh)
        stages = split(model, schedule.num_stages, cut=list(of.blocks or ()))
        for stage in schedule.placement.stages_of[mesh.coordinate("pp")]:
            materialize(stages.modules[stage], 0)
        pipeline = pl.Pipeline(
            stages,
            schedule,
            loss_fn=loss_fn,
            mesh=mesh,
            data=pl.DataParallel(of.strategy.value) if of.data > 1 else None,
        )
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True)
        stepper = BarrierStep(pipeline, optimizer, max_norm=1.0)
        torch.manual_seed(mesh.coordinate("dp"))
        batch = torch.randint(config.vocabulary_size, (2, of.microbatches * of.microbatch_size, config.sequence_length))
        self._made[name], self._optimizers[name] = (pipeline, stepper, batch), optimizer

    def steps(self, name: str, warm_up: int, count: int) -> dict[str, Any]:
        """Seconds of `count` steps, from a barrier to the end of the update, after those for warm-up.

        And the mean seconds of their parts: before the first action, of all actions by op, of the time from the first
        to the end of the last ("span"), and behind it. And of all steps, warm-up included: seconds, CPU seconds of this
        process, and those of the machine.
        """
        pipeline, stepper, (inputs, targets) = self._made[name]
        found, parts = list[float](), defaultdict[str, float](float)
        dist.barrier()
        begun, own, machine = time.perf_counter(), time.process_time(), _machine_seconds()
        for number in range(warm_up + count):
            dist.barrier()
            start = time.perf_counter()
            stepper.step(inputs, targets)
            end = time.perf_counter()
            if number < warm_up:
                continue
            found.append(end - start)
            ((_, row),) = pipeline.records
            first, last = min(began for _, began, _ in row), max(ended for _, _, ended in row)
            parts["before"] += (first - start) / count
            parts["span"] += (last - first) / count
            parts["behind"] += (end - last) / count
            for action, began, ended in row:
                parts[action.op] += (ended - began) / count
        return {
            "steps": found,
            "parts": dict(parts),
            "whole": time.perf_counter() - begun,
            "own": time.process_time() - own,
            "machine": _machine_seconds() - machine,
        }

    def memory(self, name: str) -> int:
        """Most bytes at once: parameters and optimizer states, and what a step allocates."""
        pipeline, stepper, (inputs, targets) = self._made[name]
        stepper.step(inputs, targets)  # which makes the optimizer's states
        held = pipeline.memory.held_bytes()
        states = (value for state in self._optimizers[name].state.values() for value in state.values())
        always = held.parameters + held.masters + sum(value.nbytes for value in states if value.dim())
        gc.collect()
        return always + peak_of(lambda: stepper.step(inputs, targets))

    def close_all(self) -> None:
        """End all pipelines and their mesh."""
        for pipeline, *_ in self._made.values():
            pipeline.close()
        self._made.clear()
        self._optimizers.clear()
        if self._mesh is not None:
            self._mesh.close()
            self._mesh = None
        gc.collect()


def _machine_seconds() -> float:
    """CPU seconds of all processes of this machine so far, and those that its host took away."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, soft_irq, stolen = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
