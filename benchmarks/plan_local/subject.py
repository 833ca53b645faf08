"""One process of a case: measures layers, and steps of every configuration."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import pipeloom as pl
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

    def layers(self, config: GPTConfig, samples: list[int], rates: Rates) -> LayerTimes | None:
        """The layers of a model; as many processes measure as there are cores."""
        cores = len(os.sched_getaffinity(0))
        found = None
        if self._rank < cores:
            found = measure_layers(config, samples, precision=pl.Precision("fp32"), rates=rates)
        dist.barrier()
        return found

    def build(self, name: str, config: GPTConfig, of: Configuration) -> None:
        """The pipeline and the optimizer of a configuration."""
        mesh = pl.Mesh(pp=of.pipeline, dp=of.data, tp=of.inside.tensor)
        schedule = pl.schedules.build(
            of.schedule,
            num_ranks=of.pipeline,
            num_microbatches=of.microbatches,
            num_chunks=of.chunks if of.chunks > 1 else None,
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
        self._made[name] = pipeline, stepper, batch

    def steps(self, name: str, count: int) -> list[tuple[float, float]]:
        """Seconds of some steps, from a barrier to the end of the update, and CPU seconds of this process."""
        _, stepper, (inputs, targets) = self._made[name]
        found = []
        for _ in range(_WARM_UP + count):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            stepper.step(inputs, targets)
            found.append((time.perf_counter() - start, time.process_time() - before))
        return found[_WARM_UP:]

    def busy(self, name: str) -> dict[str, float]:
        """Seconds of the actions of the last step, by op."""
        found: dict[str, float] = {}
        for _, row in self._made[name][0].records:
            for action, start, end in row:
                found[action.op] = found.get(action.op, 0.0) + end - start
        return found

    def memory(self, name: str) -> dict[str, float]:
        """Bytes that one more step holds, by kind."""
        pipeline, stepper, (inputs, targets) = self._made[name]
        from pipeloom.autograd.saved_bytes import SavedBytes

        kept = SavedBytes.beyond(*pipeline.modules())
        pipeline.memory.record_peaks()
        found: dict[str, float] = {}

        def look() -> torch.Tensor:
            held, peak = pipeline.memory.held_bytes(), pipeline.memory.peak_bytes()
            found.update(parameters=held.parameters, gradients=peak.gradients)
            return torch.empty(0)

        with kept.counting():
            stepper.step(inputs, targets, look)
        pipeline.memory.record_peaks(False)
        states = (value for state in stepper._optimizer.state.values() for value in state.values())
        found["optimizer"] = sum(value.nbytes for value in states if value.dim())
        found["activations"] = kept.peak or 0.0
        return found

    def close_all(self) -> None:
        """End all pipelines."""
        for pipeline, *_ in self._made.values():
            pipeline.close()
        self._made.clear()


def mean_layers(found: list[LayerTimes | None]) -> LayerTimes:
    """The slowest of the processes that measured the same."""
    every = [each for each in found if each is not None]
    first = every[0]
    rows = {
        samples: row._replace(
            **{
                name: tuple(
                    sum(column) / len(every)
                    for column in zip(*(getattr(each.rows[samples], name) for each in every), strict=True)
                )
                for name in ("embedding", "head")
            },
            blocks={
                kind: tuple(
                    sum(column) / len(every)
                    for column in zip(*(each.rows[samples].blocks[kind] for each in every), strict=True)
                )
                for kind in row.blocks
            },
            split=sum(each.rows[samples].split for each in every) / len(every),
        )
        for samples, row in first.rows.items()
    }
    return replace(
        first,
        rows=rows,
        update=sum(each.update for each in every) / len(every),
        step_seconds=sum(each.step_seconds for each in every) / len(every),
    )
