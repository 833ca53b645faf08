"""The steps of a synchronous schedule: one update after all micro-batches of a batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.sim import Timeline, measured_timeline
from pipeloom.train.offload import NUM_NUMBERS, offload_metrics, offload_numbers
from pipeloom.train.optimizers import learning_rate, learning_rates, make_stepper, set_learning_rates
from pipeloom.train.output.measured_memory import MemoryProbe
from pipeloom.train.output.step_metrics import (
    Records,
    StepCost,
    Waits,
    cost_metrics,
    cost_numbers,
    gathered_records,
    gathered_waits,
    read_cost,
)
from pipeloom.train.run_parts import Batches, Live, RunParts
from pipeloom.training import Update

_LEAST_LOSS_SCALE = 2.0**-10  # gradients that overflow below it overflow at any scale


class _Begun(NamedTuple):
    """A step that has run and whose update is not final yet."""

    step: int
    learning_rate: float
    loss_scale: float
    seconds: float


class FlushSteps:
    """Runs steps one after another, with a barrier after each or with post-validation.

    Args:
        parts: of the run, on this process.
        probe: of the memory of the first steps.

    Attributes:
        done: number of completed steps, over all runs.
    """

    def __init__(self, parts: RunParts, probe: MemoryProbe) -> None:
        self._parts, self._scaler, self._probe = parts, parts.scaler, probe
        self._stepper = make_stepper(parts.pipeline, parts.optimizer, parts.config.optimizer, parts.group, parts.scaler)
        self._begun: deque[_Begun] = deque()  # steps whose updates are not final yet
        self._records: Records = []  # of the last step on this process's ranks
        self._waits: Waits = {}  # inside its computations
        self._steps_here = 0
        self.done = 0

    def run(self, batches: Batches, count: int, live: Live) -> Iterator[dict[str, Any]]:
        """Make `count` steps, after which nothing is in flight; the metrics of each as they become final.

        Args:
            batches: inputs and targets, where this process reads them.
            count: number of steps.
            live: unused: a step is final at once, or after the next one.
        """
        for _ in range(count):
            self.done += 1
            yield from map(self._finish, self._step(self.done, batches))
        yield from map(self._finish, self._stepper.settle())

    def timelines(self) -> tuple[Timeline, Timeline] | None:
        """The last step, measured and predicted, on process 0; every process calls it."""
        records = gathered_records(self._parts.group, self._records)
        waits = gathered_waits(self._parts.group, self._waits, self._parts.pipeline.schedule.num_ranks)
        if self._parts.group.rank != 0:
            return None
        measured = measured_timeline(self._parts.pipeline.schedule, [rows for _, rows in records], waits=waits)
        return measured, self._parts.predictor.predict(self._parts.pipeline.program)

    def _step(self, step: int, batches: Batches) -> list[Update]:
        """Run one step; returns the updates that are final now: its own or the previous one."""
        self._parts.journal.enter(f"step {step}")
        started = time.perf_counter()
        rate = learning_rate(step - 1, self._parts.config.steps, self._parts.config.optimizer)
        rates = learning_rates(self._parts.optimizer, step - 1, self._parts.config.steps, self._parts.config.optimizer)
        set_learning_rates(self._parts.optimizer, rates)
        scale = self._scaler.scale if self._scaler else 1.0
        inputs, targets = next(batches)
        # One sum over processes per step: gradient norms for clipping, and the costs of the step.
        with self._probe.step(self._steps_here):
            updates = self._stepper.step(inputs, targets, lambda: self._cost_numbers(step))
        self._begun.append(_Begun(step, rate, scale, time.perf_counter() - started))
        return updates

    def _cost_numbers(self, step: int) -> Tensor:
        self._records, self._waits = self._parts.pipeline.records, self._parts.pipeline.waits
        self._parts.journal.enter(f"step {step}, update")
        self._probe.look(self._steps_here)
        cost = cost_numbers(self._parts.pipeline, self._records, self._parts.group.place, self._parts.group.size)
        return torch.cat([cost, offload_numbers(self._parts.pipeline, self._parts.optimizer)])

    def _finish(self, update: Update) -> dict[str, Any]:
        """The metrics of the first step that is not final yet."""
        begun = self._begun.popleft()
        loss, norm = float(update.loss), float(update.grad_norm)
        cost = read_cost(update.numbers[:-NUM_NUMBERS], self._parts.pipeline.schedule, self._parts.group.size)
        row = {"step": begun.step, "loss": loss, "grad_norm": norm, "lr": begun.learning_rate}
        if self._scaler is not None:
            row |= {"loss_scale": begun.loss_scale, "skipped_steps": self._scaler.num_skipped}
        row |= self._timing(begun.seconds, cost) | offload_metrics(self._parts.config, update.numbers[-NUM_NUMBERS:])
        self._parts.journal.write(row)
        if not update.applied and not (update.skipped and begun.loss_scale >= _LEAST_LOSS_SCALE):
            raise RunError(
                f"step {begun.step} has loss {loss} and gradient norm {norm}: training cannot continue. Lower "
                "optimizer.learning_rate, or resume from an earlier checkpoint with another seed."
            )
        return row

    def _timing(self, step_seconds: float, cost: StepCost) -> dict[str, Any]:
        """The metrics of time and memory."""
        self._parts.predictor.observe(cost)
        self._steps_here += 1
        if _shows_messages(self._steps_here):
            self._parts.predictor.observe_messages(gathered_records(self._parts.group, self._records))
        tokens = self._parts.config.batch.size * self._parts.config.model.sequence_length
        return {
            "tokens_per_second": tokens / step_seconds,
            "step_seconds": step_seconds,
            **cost_metrics(cost, self._parts.predictor, self._parts.pipeline.program, self._parts.group),
        }


def _shows_messages(steps_here: int) -> bool:
    """Whether message times are taken from this step: the first warms up, and each costs a collective."""
    return 2 <= steps_here <= 6 or steps_here % 20 == 0
