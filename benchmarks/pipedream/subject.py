"""What runs in each process: streams, or steps that flush, of stages that wait."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
from benchmarks.common.processes import run_first
from benchmarks.common.workloads import WaitingStage, wait
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.engine.binders import computations
from pipeloom.ir import Action, Op, Schedule


def _made_up_for(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, and what it computes the next waits are shorter by."""

    def timed(*args: Any) -> Any:
        start = wait.awake_seconds()
        result = function(*args)
        wait.make_up(wait.awake_seconds() - start)
        return result

    return timed


class _Stage(WaitingStage):
    forward = _made_up_for(WaitingStage.forward)


class Cell(NamedTuple):
    """What is run.

    Attributes:
        schedule: of it.
        stage_seconds: for each stage, F and B of a micro-batch on one rank; F is a third.
        num_batches: how many.
    """

    schedule: Schedule
    stage_seconds: tuple[float, ...]
    num_batches: int

    @property
    def micro_batches(self) -> int:
        """Of a batch; of one step, where the schedule flushes."""
        return self.schedule.microbatches_per_update or self.schedule.num_microbatches

    @property
    def ideal_seconds(self) -> float:
        """A micro-batch on the slowest stage, all its replicas busy."""
        replicas = map(len, self.schedule.placement.replicas)
        return max(seconds / r for seconds, r in zip(self.stage_seconds, replicas, strict=True))

    def model(self, *, waits: bool) -> list[nn.Module]:
        """The stages."""
        torch.manual_seed(7)
        return [_Stage((seconds / 3 if waits else 0.0,) * 3) for seconds in self.stage_seconds]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.num_batches, self.micro_batches, 4)
        return [(x, torch.zeros_like(x)) for x in torch.randn(shape, generator=generator)]


class Answer(NamedTuple):
    """What one rank says of a cell.

    Attributes:
        period_seconds: of a micro-batch: of the stage in the steady state, or of whole steps.
        versions, version_bytes: of the parameters, the most that existed at once.
        weights: after the run.
    """

    period_seconds: float
    versions: int
    version_bytes: int
    weights: dict[str, list[float]]


def run(cell: Cell, *, waits: bool = True, transport: str = "auto") -> Answer:
    """Train by a cell."""
    model, loss_fn = cell.model(waits=waits), _made_up_for(nn.functional.mse_loss)
    with (
        mock.patch.object(computations, "run_backward", _made_up_for(computations.run_backward)),
        pl.Pipeline(model, cell.schedule, loss_fn=loss_fn, transport=transport) as pipe,
    ):
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01, momentum=0.9)
        optimizer.step = _made_up_for(optimizer.step)  # type: ignore[method-assign]
        gc.collect()  # a full collection takes as long as some stages; what cells before left shall not bring it about
        versions = 1
        version_bytes = max(sum(p.nbytes for p in held.values()) for held in pipe.state.ownership.held.values())
        if cell.schedule.microbatches_per_update is None:
            period = _steps(cell, pl.BarrierStep(pipe, optimizer))
        else:
            stream = pl.Stream(pipe, optimizer)
            stream.run(cell.batches())
            versions, version_bytes = max(stream.peak_weight_versions.values()), max(stream.peak_weight_bytes.values())
            ((_, records), *_) = pipe.records
            period = _period(cell, records)
        return Answer(period, versions, version_bytes, {n: p.tolist() for n, p in pipe.named_parameters()})


def _steps(cell: Cell, stepper: pl.BarrierStep) -> float:
    first, *others = cell.batches()
    stepper.step(*first)  # allocates and connects
    start = time.monotonic()
    for batch in others:
        stepper.step(*batch)
    return (time.monotonic() - start) / (len(others) * cell.micro_batches)


def _period(cell: Cell, records: list[tuple[Action, float, float]]) -> float:
    """From the ends of backwards, without start-up and drain."""
    schedule = cell.schedule
    edge = 2 * schedule.num_ranks * cell.micro_batches
    ends = [
        (action.microbatch or 0, end)
        for action, _, end in records
        if action.op is Op.B and edge <= (action.microbatch or 0) < schedule.num_microbatches - edge
    ]
    (first, start), (last, end) = ends[0], ends[-1]
    return (end - start) / (last - first)


class Subject:
    """One rank of a crew."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def run_first(self) -> bool:
        """Let all threads of this process run before others."""
        return all(run_first(int(thread)) for thread in os.listdir("/proc/self/task"))

    def run(self, cell: Any) -> Answer:
        return run(cell)
