"""One process of a case: measures layers, and steps of every configuration."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.plan_local.held import HeldBytes

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

_WARM_UP = 1  # steps of a configuration in a round before those that count


class Trainer:
    """The subject of a crew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._made: dict[str, tuple[pl.Pipeline, BarrierStep, Any]] = {}
        self._held: dict[str, HeldBytes] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._meshes: dict[tuple[int, int, int], pl.Mesh] = {}

    def layers(self, config: GPTConfig, samples: list[int], rates: Rates, side_by_side: int) -> LayerTimes | None:
        """The layers of a model; so many processes measure at the same time."""
        found = None
        if self._rank < side_by_side:
            found = measure_layers(config, samples, precision=pl.Precision("fp32"), rates=rates)
        dist.barrier()
        return found

    def build(self, name: str, config: GPTConfig, of: Configuration) -> None:
        """The pipeline and the optimizer of a configuration."""
        degrees = of.pipeline, of.data, of.inside.tensor
        if degrees not in self._meshes:  # each has process groups, whose threads wake up a hundred times per second
            self._meshes[degrees] = pl.Mesh(pp=of.pipeline, dp=of.data, tp=of.inside.tensor)
        mesh = self._meshes[degrees]
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
        held = self._held[name] = HeldBytes()
        pipeline = pl.Pipeline(
            stages,
            schedule,
            loss_fn=loss_fn,
            mesh=mesh,
            data=pl.DataParallel(of.strategy.value) if of.data > 1 else None,
            blackbox=held,
        )
        optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-4, fused=True)
        stepper = BarrierStep(pipeline, optimizer, max_norm=1.0)
        torch.manual_seed(mesh.coordinate("dp"))
        batch = torch.randint(config.vocabulary_size, (2, of.microbatches * of.microbatch_size, config.sequence_length))
        self._made[name], self._optimizers[name] = (pipeline, stepper, batch), optimizer

    def steps(self, name: str, count: int) -> dict[str, Any]:
        """Seconds of some steps, from a barrier to the end of the update, after those for warm-up.

        And of all of them, the warm-up included: seconds, CPU seconds of this process, CPU seconds of the machine.
        """
        _, stepper, (inputs, targets) = self._made[name]
        found = []
        dist.barrier()
        begun, own, machine = time.perf_counter(), time.process_time(), _machine_seconds()
        for _ in range(_WARM_UP + count):
            dist.barrier()
            start = time.perf_counter()
            stepper.step(inputs, targets)
            found.append(time.perf_counter() - start)
        return {
            "steps": found[_WARM_UP:],
            "whole": time.perf_counter() - begun,
            "own": time.process_time() - own,
            "machine": _machine_seconds() - machine,
        }

    def busy(self, name: str) -> dict[str, float]:
        """Seconds of the actions of the last step, by op, and from the first to the end of the last one ("span")."""
        (_, row), *_ = self._made[name][0].records
        found = {"span": max(end for _, _, end in row) - min(start for _, start, _ in row)}
        for action, start, end in row:
            found[action.op] = found.get(action.op, 0.0) + end - start
        return found

    def memory(self, name: str) -> dict[str, float]:
        """Most bytes that two steps hold, by kind."""
        pipeline, stepper, (inputs, targets) = self._made[name]
        stepper.step(inputs, targets)  # which makes the optimizer's states
        kept = self._held[name]
        pipeline.memory.record_peaks()
        sums = [0]

        def look() -> torch.Tensor:
            sums.append(sum(p.grad.nbytes for p in pipeline.parameters() if p.grad is not None))
            return torch.empty(0)

        with kept.counting(pipeline):
            stepper.step(inputs, targets, look)
        held, peak = pipeline.memory.held_bytes(), pipeline.memory.peak_bytes()
        pipeline.memory.record_peaks(False)
        states = (value for state in self._optimizers[name].state.values() for value in state.values())
        return {
            "parameters": held.parameters,
            "masters": held.masters,
            "gradients": max(peak.gradients, *sums),
            "gathered": peak.gathered,
            "optimizer": sum(value.nbytes for value in states if value.dim()),
            "activations": kept.peak,
        }

    def close_all(self) -> None:
        """End all pipelines."""
        for pipeline, *_ in self._made.values():
            pipeline.close()
        self._made.clear()
        self._optimizers.clear()
        self._held.clear()


def _machine_seconds() -> float:
    """CPU seconds of all processes of this machine so far, and those that its host took away."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system, _, _, irq, soft_irq, stolen = map(int, stat.readline().split()[1:9])
    return (user + nice + system + irq + soft_irq + stolen) / os.sysconf("SC_CLK_TCK")
