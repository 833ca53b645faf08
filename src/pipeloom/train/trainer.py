"""`Trainer`: one process's part of a run, step by step. `pipeloom.train.run` is the loop around it."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.models import loss_fn
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.report import write_report
from pipeloom.runtime import LossScaler, Pipeline, Update
from pipeloom.runtime.launcher import Membership
from pipeloom.sim import measured_timeline
from pipeloom.train import restart
from pipeloom.train.build import build_stages, model_config, with_known_cut
from pipeloom.train.config import TrainConfig
from pipeloom.train.copies import share
from pipeloom.train.data import Sampler
from pipeloom.train.data_costs import measure_data_costs
from pipeloom.train.generate import generate
from pipeloom.train.group import Group
from pipeloom.train.layout import make_schedule
from pipeloom.train.less_memory import (
    NUM_NUMBERS,
    activations_away,
    offload_metrics,
    offload_notices,
    offload_numbers,
    shared,
    states_away,
)
from pipeloom.train.measured_memory import MemoryProbe
from pipeloom.train.metrics import (
    Predictor,
    Records,
    StepCost,
    Waits,
    cost_numbers,
    gathered_records,
    gathered_waits,
    read_cost,
)
from pipeloom.train.notices import found_text, skipped_notice
from pipeloom.train.optimizer import (
    learning_rate,
    learning_rates,
    make_optimizer,
    make_stepper,
    set_learning_rates,
)
from pipeloom.train.output import append_metrics, in_use, prepare_output, write_timelines, writing
from pipeloom.train.progress import Display
from pipeloom.train.slices import slice_lengths
from pipeloom.train.stream_steps import StreamSteps
from pipeloom.train.validate import open_corpus, resume_path
from pipeloom.words import counted


def _shows_messages(steps_here: int) -> bool:
    """Whether the times of messages are taken from this step: the first warms up, and it costs a collective."""
    return 2 <= steps_here <= 6 or steps_here % 20 == 0


_LEAST_LOSS_SCALE = 2.0**-10  # gradients that overflow below it do so at any scale


class _Begun(NamedTuple):
    """A step that has run and whose update is not final."""

    step: int
    learning_rate: float
    loss_scale: float
    seconds: float


class Trainer:
    """One process's part of a run.

    Steps count from 1: step N is the Nth update, and checkpoint-N what is there after it.
    """

    def __init__(self, config: TrainConfig, group: Group, member: Membership | None) -> None:
        self.config = config
        self.group = group
        self.black_box = member.black_box if member else None
        self.output_dir = Path(config.output_dir)
        self._held = ExitStack()
        self._enter("setup")
        self.schedule = make_schedule(config)
        self.corpus = open_corpus(config)
        self.sampler = Sampler(self.corpus.num_windows(config.model.sequence_length), config.seed)
        self.samples_seen = 0
        self.stages = build_stages(config, self.schedule, self.corpus, group, group.device, group.pipeline_rank)
        self.transport = "loopback" if config.local else config.parallel.transport
        self.pipe = Pipeline(
            self.stages,
            self.schedule,
            loss_fn=loss_fn,
            transport=self.transport,
            slices=slice_lengths(config),
            mesh=group.mesh,
            data=shared(config, group.device.type),
            precision=config.number_format if config.precision.dtype != "fp32" else None,
            recompute=config.memory.recompute,
            offload=activations_away(config, group.device.type),
            blackbox=self.black_box and self.black_box.action_buffer,
        )
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.pipe.named_parameters()}
        shapes = {name: part.shape for name, part in self.pipe.ranges.items()}
        self.optimizer = make_optimizer(self.pipe.named_parameters(), config.optimizer, shapes)
        self.stepped = states_away(self.optimizer, config, group.device.type)
        scales = config.precision.dtype == "fp16"
        precision = config.precision
        self.scaler = LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps) if scales else None
        self._begun: deque[_Begun] = deque()  # steps whose updates are not final yet
        self.program = self.pipe.program
        self.predictor = Predictor(measure_data_costs(self.pipe, group))
        streams = self.schedule.microbatches_per_update is not None
        self.stream = StreamSteps(self.pipe, self.stepped, self.predictor, config, group) if streams else None
        self.stepper = None if streams else make_stepper(self.pipe, self.stepped, config.optimizer, group, self.scaler)
        self.probe = MemoryProbe(
            self.pipe, self.stepped, with_known_cut(config, self.stages), group, self.corpus.vocabulary_size
        )
        self.records: Records = []  # of the last training step on this process's ranks
        self.waits: Waits = {}  # inside its computations
        self.steps_here = 0
        self.notices = skipped_notice(self.corpus.skipped) + offload_notices(config, group.device.type)
        self.resumed: Path | None = None
        self.first_step = 1
        self.kept_up_to = 0  # checkpoints up to this step are not deleted

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.pipe.close()
        if isinstance(self.stepped, OffloadedOptimizer):
            self.stepped.close()
        self._held.close()

    def resume(self) -> int:
        """Go on from a checkpoint where one was asked for; returns how many steps are done."""
        restart.seed_generators(self.config.seed, 0, self.group.rank)
        self.resumed = resume_path(self.config)
        if self.resumed is None:
            return 0
        self._enter(f"loading {self.resumed}")
        done = restart.load(self, self.resumed).step
        self.first_step = done + 1
        if self.stream is not None:
            self.stream.done = done
        return done

    def open_output(self, shown: Display) -> None:
        """Make the output directory ready and say what is about to run."""
        if self.group.rank == 0:
            if self.black_box is None:  # else the launcher holds it
                self._held.enter_context(in_use(self.output_dir))
            with writing(self.output_dir):
                moved = prepare_output(self.config, self.resumed, self.first_step - 1)
            if moved:
                shown.say(moved)
        self.group.all_gather(b"")  # nobody saves or logs before the directory is ready
        sizes = model_config(self.config, self.corpus.vocabulary_size)
        start = f", from {self.resumed}" if self.resumed else ""
        shown.say(
            f"{sizes.num_parameters:,} parameters in {self.schedule.num_stages} stages, schedule {self.schedule.name}, "
            f"{self._ranks_text()}, {counted(self.config.num_microbatches, 'micro-batch')} a step; "
            f"{found_text(self.corpus)}{start}"
        )
        for line in self.notices:
            shown.say(line)

    def _ranks_text(self) -> str:
        """``4 ranks``, or ``2 copies of 4 ranks (zero2)``, and what is not in float32."""
        copies, dtype = self.group.num_copies, self.config.precision.dtype
        text = counted(self.pipe.num_ranks, "rank")
        if copies > 1:
            text = f"{copies} copies of {text} ({self.config.parallel.data_strategy})"
        return text if dtype == "fp32" else f"{text} in {dtype}"

    def steps(self, first: int, last: int, shown: Display) -> Iterator[dict[str, Any]]:
        """Updates `first` to `last`, after which nothing is in flight; the metrics of each as they become final."""
        if self.stream is not None:
            self._enter(f"steps {first} to {last}")
            count = last - first + 1
            start = self.samples_seen
            batches = (self._batch(start + k * self.config.batch.size) for k in range(count))
            try:
                rows = self.stream.run(batches, count, shown.live, partial(gathered_records, self.group))
            finally:
                for row in self.stream.known:  # of a run that failed
                    self._written(row)
            self.samples_seen = start + count * self.config.batch.size
            yield from map(self._written, rows)
            return
        for step in range(first, last + 1):
            yield from self._step(step)
        assert self.stepper is not None
        for update in self.stepper.settle():
            yield self._finish(update)

    def _step(self, step: int) -> list[dict[str, Any]]:
        """One update of the weights; returns the metrics of what is final now: this step, or the one before."""
        assert self.stepper is not None
        self._enter(f"step {step}")
        started = time.perf_counter()
        rate = learning_rate(step - 1, self.config.steps, self.config.optimizer)
        rates = learning_rates(self.optimizer, step - 1, self.config.steps, self.config.optimizer)
        set_learning_rates(self.optimizer, rates)
        scale = self.scaler.scale if self.scaler else 1.0
        inputs, targets = self._batch(self.samples_seen)
        self.samples_seen += self.config.batch.size
        # One sum over processes a step: gradient norms for clipping, and what the step cost.
        with self.probe.step(self.steps_here):
            updates = self.stepper.step(inputs, targets, lambda: self._cost_numbers(step))
        self._begun.append(_Begun(step, rate, scale, time.perf_counter() - started))
        return [self._finish(update) for update in updates]

    def _cost_numbers(self, step: int) -> Tensor:
        self.records, self.waits = self.pipe.records, self.pipe.waits
        self._enter(f"step {step}, update")
        self.probe.look(self.steps_here)
        cost = cost_numbers(self.pipe, self.records, self.group.place, self.group.size)
        return torch.cat([cost, offload_numbers(self.pipe, self.stepped)])

    def _finish(self, update: Update) -> dict[str, Any]:
        """The metrics of the first step that is not final yet, which rank 0 writes down."""
        begun = self._begun.popleft()
        loss, norm = float(update.loss), float(update.grad_norm)
        cost = read_cost(update.numbers[:-NUM_NUMBERS], self.schedule, self.group.size)
        row = {"step": begun.step, "loss": loss, "grad_norm": norm, "lr": begun.learning_rate}
        if self.scaler is not None:
            row |= {"loss_scale": begun.loss_scale, "skipped_steps": self.scaler.num_skipped}
        row |= self._timing(begun.seconds, cost) | offload_metrics(self.config, update.numbers[-NUM_NUMBERS:])
        self._written(row)
        if not update.applied and not (update.skipped and begun.loss_scale >= _LEAST_LOSS_SCALE):
            raise RunError(
                f"step {begun.step} has loss {loss} and gradient norm {norm}: training cannot go on "
                "from there; lower optimizer.learning_rate, or resume from an earlier checkpoint with another seed"
            )
        return row

    def _written(self, row: dict[str, Any]) -> dict[str, Any]:
        """`row`, which rank 0 has written down."""
        if self.group.rank == 0:
            append_metrics(self.output_dir, row)
        return row

    def evaluate(self, step: int) -> float:
        """The mean loss over the validation batches; gradients, modes and random states stay as they are."""
        self._enter(f"evaluation after step {step}")
        batches = self.corpus.validation_batches(
            self.config.model.sequence_length, self.config.batch.size, self.config.eval_batches
        )
        losses = [float(self.pipe.evaluate(*self._placed(inputs, targets))) for inputs, targets in batches]
        mean = statistics.fmean(losses)
        self._written({"step": step, "eval_loss": mean})
        return mean

    def save(self, step: int) -> Path:
        """Write ``checkpoint-{step}``."""
        self._enter(f"checkpoint after step {step}")
        return restart.save(self, step)

    def report(self, shown: Display) -> None:
        """Rank 0 writes the timelines of the last step, measured and predicted, and the report."""
        self._enter("report")
        if self.first_step > self.config.steps:
            return
        self.probe.write(self.output_dir)
        records = gathered_records(self.group, self.records) if self.stream is None else []
        waits = gathered_waits(self.group, self.waits, self.pipe.num_ranks)
        if self.group.rank == 0:
            if self.stream is not None:
                measured, predicted = self.stream.timelines()
            else:
                measured = measured_timeline(self.pipe.schedule, [rows for _, rows in records], waits=waits)
                predicted = self.predictor.predict(self.program)
            write_timelines(self.output_dir, measured=measured, predicted=predicted)
            shown.say(f"report: {write_report(self.output_dir)}")

    def sample(self) -> str:
        """A short text that the model writes."""
        self._enter("sample")
        self.pipe.refresh()
        in_parts = self.config.shared is not None and self.config.parallel.data_strategy == "zero3"
        return generate(
            self.stages,
            self.schedule.placement,
            self.group,
            self.corpus.tokenizer,
            prompt=self.config.sample_prompt,
            num_tokens=self.config.sample_tokens,
            sequence_length=self.config.model.sequence_length,
            temperature=self.config.sample_temperature,
            seed=self.config.seed,
            transport=self.transport,
            through=self.pipe if in_parts else None,
        )

    def _enter(self, phase: str) -> None:
        """Tell the black box what comes now."""
        if self.black_box is not None:
            self.black_box.phase = phase

    def _batch(self, samples_seen: int) -> tuple[Tensor | None, Tensor | None]:
        """What this process reads of the batch behind so many samples."""
        windows = self.sampler.batch(samples_seen, self.config.batch.size)
        return self._placed(*self.corpus.windows(windows, self.config.model.sequence_length))

    def _placed(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What this process reads of a batch of all copies, on its device."""
        device, own = self.group.device, share(len(inputs), self.group.copy, self.group.num_copies)
        return (
            inputs[own.start : own.stop].to(device) if self.pipe.needs_inputs else None,
            targets[own.start : own.stop].to(device) if self.pipe.needs_targets else None,
        )

    def _timing(self, step_seconds: float, cost: StepCost) -> dict[str, Any]:
        """The metrics of time and memory; rank 0 also predicts."""
        self.predictor.observe(cost)
        self.steps_here += 1
        if _shows_messages(self.steps_here):
            self.predictor.observe_messages(gathered_records(self.group, self.records))
        tokens = self.config.batch.size * self.config.model.sequence_length
        predicted = self.predictor.predict(self.program).bubble_fraction if self.group.rank == 0 else math.nan
        return {
            "tokens_per_second": tokens / step_seconds,
            "step_seconds": step_seconds,
            "bubble_fraction": cost.bubble_fraction,
            "predicted_bubble_fraction": predicted,
            "peak_memory_bytes": cost.peak_memory_bytes,
            "live_activations": cost.live_activations,
        }
