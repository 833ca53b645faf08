"""The steps of a synchronous schedule, one update after all micro-batches of a batch."""

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.sim import Timeline, measured_timeline
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.memory_probe import LOOKED_AT, MemoryProbe
from pipeloom.train.optimizers import learning_rate, learning_rates, set_learning_rates
from pipeloom.train.output.computing_seconds import CoreWaits, computing_seconds
from pipeloom.train.output.directory import write_timelines
from pipeloom.train.output.expert_metrics import declared_metrics
from pipeloom.train.output.line_limit import LineLimit
from pipeloom.train.output.nonfinite_words import fault_words, stopped_words
from pipeloom.train.output.slow_links import LinkWatch
from pipeloom.train.output.step_metrics import (
    Collectives,
    Records,
    Waits,
    cost_metrics,
    cost_numbers,
    gathered_collectives,
    gathered_records,
    gathered_waits,
    read_cost,
)
from pipeloom.train.output.stragglers import StragglerWatch
from pipeloom.train.recovery.step_agreement import StepAgreement
from pipeloom.train.run_parts import Batches, Live, RunParts
from pipeloom.training import BarrierStep, OptimizerStep, Pipeline, PostValidatedStep, Update
from pipeloom.training.loss_scaler import LEAST_LOSS_SCALE
from pipeloom.training.nonfinite import NonFiniteSearch
from pipeloom.training.observations import Entry, observed_in

_NUM_OFFLOAD_NUMBERS = 4
_TIMELINE_SECONDS = 30.0  # between two timelines that are written while the run trains


class FlushSteps:
    """Runs steps one after another, with a barrier after each or with post-validation.

    Args:
        parts: of the run.
        probe: of memory.
        agreement: of a run that recovers from the loss of ranks; else None.

    Attributes:
        done: number of completed steps, over all runs.
    """

    def __init__(self, parts: RunParts, probe: MemoryProbe, agreement: StepAgreement | None = None) -> None:
        self._parts, self._scaler, self._probe, self._agreement = parts, parts.scaler, probe, agreement
        max_norm = parts.config.optimizer.clip_norm or math.inf
        self._stepper: OptimizerStep
        if parts.config.optimizer.barrier:
            self._stepper = BarrierStep(
                parts.pipeline,
                parts.optimizer,
                max_norm=max_norm,
                sum_over_processes=self._sum,
                scaler=parts.scaler,
                accept=self._accept,
                search=None if parts.config.graphs else _search(parts),
                retries=parts.config.on_nonfinite == "retry",
            )
        else:
            self._stepper = PostValidatedStep(parts.pipeline, parts.optimizer, max_norm=max_norm)
        # Step, learning rate, loss scale, tokens and seconds of the steps whose updates are not final yet.
        self._begun: deque[tuple[int, float, float, int, float]] = deque()
        self._records: Records = []  # of the last step on this process's ranks
        self._waits: Waits = {}  # inside its computations
        self._collectives: Collectives = []  # inside them too
        self._declared: list[Entry] | None = None  # what the layers of all processes declare in a step
        self._spike = ""
        self._spike_lines, self._straggler_lines = LineLimit(), LineLimit()
        # Numbers of processes, or of the ranks of a process that has all of them.
        self._slots = max(parts.group.size, parts.pipeline.schedule.num_ranks)
        self._stragglers = StragglerWatch(parts.pipeline.schedule.num_ranks)
        self._core_waits = CoreWaits()
        self._links, self._link_lines = LinkWatch(), LineLimit()
        self._data_seconds = 0.0
        self._next_timelines = 0.0
        self._steps_here = 0
        self.done = 0

    def run(self, batches: Batches, count: int, live: Live) -> Iterator[dict[str, Any]]:
        """Make `count` steps, after which nothing is in flight; the metrics of each as they become final.

        `live` is unused: a step is final at once, or after the next one. Fewer steps are made where a signal asks a
        process to end: the sum over processes at the end of a step tells all of them. With ``on_spike=rewind``, a step
        with a spike is the last one.
        """
        for _ in range(count):
            self.done += 1
            row: dict[str, Any] = {}
            for update in self._step(self.done, batches):
                yield (row := self._finish(update))
            if self._parts.group.preemption.agreed or ("spike" in row and self._parts.config.on_spike == "rewind"):
                break
        yield from map(self._finish, self._stepper.settle())

    def _look_at_messages(self, step: int) -> None:
        """Take the message times of the last step; a collective call."""
        records = gathered_records(self._parts.group, self._records)
        self._parts.predictor.observe_records(self._parts.pipeline.program, records)
        for link, text in self._links.observe(records).items():
            self._link_lines.add(link, f"step {step}  {text}")
        self._show(records)

    def _show(self, records: Records) -> None:
        """Now and then, rank 0 writes the timelines of this step, for who watches the run."""
        parts, now = self._parts, time.monotonic()
        if parts.group.rank == 0 and now >= self._next_timelines:
            measured = measured_timeline(parts.pipeline.schedule, [rows for _, rows in records])
            predicted = parts.predictor.predict(parts.pipeline.program)
            with suppress(RunError):  # such as a full disk: training needs no picture
                write_timelines(parts.output_dir, measured, predicted)
            self._next_timelines = now + _TIMELINE_SECONDS

    def timelines(self) -> tuple[Timeline, Timeline] | None:
        """The last step, measured and predicted, on process 0; every process calls it."""
        records = gathered_records(self._parts.group, self._records)
        schedule = self._parts.pipeline.schedule
        waits = gathered_waits(self._parts.group, self._waits, schedule.num_ranks)
        inside = gathered_collectives(self._parts.group, self._collectives, schedule.num_ranks)
        if self._parts.group.rank != 0:
            return None
        measured = measured_timeline(schedule, [rows for _, rows in records], waits=waits, collectives=inside)
        return measured, self._parts.predictor.predict(self._parts.pipeline.program)

    def _step(self, step: int, batches: Batches) -> list[Update]:
        """Run one step; returns the updates that are final now: its own or the previous one."""
        self._parts.journal.enter(f"step {step}", patient=False)
        started = time.perf_counter()
        config, optimizer = self._parts.config, self._parts.optimizer
        rate = learning_rate(step - 1, config.steps, config.optimizer)
        set_learning_rates(optimizer, learning_rates(optimizer, step - 1, config.steps, config.optimizer))
        scale = self._scaler.scale if self._scaler else 1.0
        asked = time.perf_counter()
        inputs, targets, num_tokens = next(batches)
        self._data_seconds = time.perf_counter() - asked
        # One sum over processes per step: gradient norms for clipping, and the costs of the step.
        with self._probe.step(self._steps_here):
            updates = self._stepper.step(inputs, targets, lambda: self._cost_numbers(step))
        self._begin_update()  # also where only the loss scale has changed
        self._begun.append((step, rate, scale, num_tokens, time.perf_counter() - started))
        self._parts.journal.count_step()
        return updates

    def _sum(self, values: Tensor) -> Tensor:
        total = self._parts.group.sum
        return total(values) if self._agreement is None else self._agreement.sum(values, total)

    def _cost_numbers(self, step: int) -> Tensor:
        pipeline = self._parts.pipeline
        self._records, self._waits, self._collectives = pipeline.records, pipeline.waits, pipeline.collectives
        self._parts.journal.enter(f"step {step}, update", patient=False)
        self._probe.look(self._steps_here)
        cost = cost_numbers(self._parts.pipeline, self._records, self._parts.group)
        if self._declared is None:
            self._declared = pipeline.observed.entries()
        declared = pipeline.observed.vector(self._declared)
        asked = torch.tensor([self._parts.group.preemption.asked], dtype=torch.float64)
        offload = _offload_numbers(self._parts.pipeline, self._parts.optimizer)
        return torch.cat([declared, cost, offload, self._own_seconds(), asked])

    def _own_seconds(self) -> Tensor:
        """Seconds of forwards, of backwards and of waiting for samples, in this process's slot; shape [3 * slots]."""
        pipeline, place = self._parts.pipeline, self._parts.group.place
        data = torch.zeros(1, self._slots, dtype=torch.float64)
        data[0, place] = self._data_seconds
        computing = computing_seconds(pipeline, self._records, self._slots, place, self._core_waits.seconds)
        return torch.cat([computing, data]).flatten()

    def _begin_update(self) -> None:
        if self._agreement is not None:
            self._agreement.begin_update()

    def _accept(self, loss: float, norm: float) -> bool:
        """Whether the update of a step is made; every process decides by the same numbers."""
        self._begin_update()
        self._spike = self._parts.band.observe(loss, norm) or ""
        return not self._spike or self._parts.config.on_spike == "warn"

    def _warnings(self, step: int, update: Update, seconds: Tensor, step_seconds: float) -> dict[str, Any]:
        """Keys of a row of metrics about spikes, slow ranks and slow links; "warnings" are the lines to show."""
        found: dict[str, Any] = {}
        if update.applied and not self._parts.config.optimizer.barrier:  # the stepper has not asked
            self._accept(float(update.loss), float(update.grad_norm))
        if update.rerun is not None and update.rerun.finite and update.applied:
            found["hardware_fault"] = fault = fault_words(update.rerun)
            self._spike_lines.add("fault", f"step {step}  {fault}; the second result is used")
        if self._spike:
            found["spike"] = self._spike
            text = f"step {step}  {self._spike}{'; update left out' if update.left_out else ''}"
            if self._parts.config.on_spike != "rewind":  # which has lines of its own
                self._spike_lines.add("spike", text)
            self._spike = ""
        forwards, backwards, data = seconds.view(3, self._slots).tolist()
        for key, text in self._stragglers.observe((forwards, backwards), data, step_seconds).items():
            self._straggler_lines.add(key, f"step {step}  {text}")
        slow = {
            "stragglers": self._stragglers.slow(),
            "sample_waits": self._stragglers.waiting(),
            "slow_links": self._links.slow(),
        }
        found |= {key: each for key, each in slow.items() if each}
        due = (each.line(time.monotonic()) for each in (self._spike_lines, self._straggler_lines, self._link_lines))
        lines = [line for line in due if line is not None]
        return found | ({"warnings": lines} if lines else {})

    def _finish(self, update: Update) -> dict[str, Any]:
        """The metrics of the first step that is not final yet."""
        step, rate, scale, num_tokens, seconds = self._begun.popleft()
        parts, loss, norm = self._parts, float(update.loss), float(update.grad_norm)
        declared = self._declared or []
        summed, own_seconds = update.numbers[:-1].tensor_split([-3 * self._slots])
        own, numbers = summed.tensor_split([1 + sum(entry.length for entry in declared)])
        if update.numbers[-1] and not parts.group.preemption.agreed:
            parts.group.preemption.agree()
        cost = read_cost(numbers[:-_NUM_OFFLOAD_NUMBERS], parts.pipeline.schedule, parts.group.size)
        parts.predictor.observe(cost)
        self._steps_here += 1
        row = {"step": step, "loss": loss, "grad_norm": norm, "lr": rate}
        if self._scaler is not None:
            row |= {"loss_scale": scale, "skipped_steps": self._scaler.num_skipped}
        row |= {
            "tokens_per_second": num_tokens / seconds,
            "step_seconds": seconds,
            **cost_metrics(cost, parts.predictor, parts.pipeline.program, parts.group),
            **_offload_metrics(parts.config, numbers[-_NUM_OFFLOAD_NUMBERS:]),
        }
        observed = observed_in(declared, own)
        row |= declared_metrics(observed.losses, observed.quantities)
        row |= self._warnings(step, update, own_seconds, seconds)
        parts.journal.write(row)
        if self._agreement is not None:
            self._agreement.finish(step, row)
        # After all that makes this step complete, since another rank may be lost meanwhile. The first step warms up,
        # and message times cost a collective.
        if 2 <= self._steps_here <= 6 or self._steps_here % 20 == 0 or self._links.suspects:
            self._look_at_messages(step)
        if self._steps_here == LOOKED_AT:  # runs that are killed, or recover after their last step, have it too
            self._probe.write(needed=False)
        if not (update.applied or update.left_out) and not (update.skipped and scale >= LEAST_LOSS_SCALE):
            raise RunError(f"step {step} has loss {loss} and gradient norm {norm}{stopped_words(update.rerun)}")
        return row


def _search(parts: RunParts) -> NonFiniteSearch:
    """What runs a step again that is not finite."""
    group = parts.group
    return NonFiniteSearch(parts.pipeline, group.gather_json, replica=group.replica, num_replicas=group.data_degree)


def _offload_numbers(pipe: Pipeline, optimizer: Any) -> Tensor:
    """Offloaded bytes of states and of parameters, bytes moved so far and seconds waited so far, of this process.

    Shape [4], float64.
    """
    moved, waited = pipe.memory.offload_traffic
    states = getattr(optimizer, "offloaded_bytes", 0)
    moved += getattr(optimizer, "moved_bytes", 0)
    waited += getattr(optimizer, "wait_seconds", 0.0)
    return torch.tensor([states, pipe.memory.offloaded_parameters.num_bytes, moved, waited], dtype=torch.float64)


def _offload_metrics(config: TrainConfig, numbers: Tensor) -> dict[str, Any]:
    """The sum of `_offload_numbers` over processes as keys of a row of metrics; none without an offload target."""
    if config.memory.offload is None:
        return {}
    *sizes, waited = numbers.tolist()
    names = ("offloaded_state_bytes", "offloaded_parameter_bytes", "offload_moved_bytes")
    return {**dict(zip(names, map(int, sizes), strict=True)), "offload_wait_seconds": waited}
