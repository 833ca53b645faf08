"""`train`, the loop of `pipeloom train`, and `Trainer`, its steps on one process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, RunError
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.processes.launcher import Membership
from pipeloom.report import write_report
from pipeloom.train import resume
from pipeloom.train.config.data_parallel import samples_of_replica
from pipeloom.train.config.memory import chosen_words, under_cap
from pipeloom.train.config.schedule import AUTO
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.tokenizers import load_tokenizer
from pipeloom.train.flush_steps import FlushSteps
from pipeloom.train.generate import generate
from pipeloom.train.output.directory import in_use, prepare_output, write_timelines, writing
from pipeloom.train.output.measured_memory import MemoryProbe
from pipeloom.train.output.notices import found_text
from pipeloom.train.output.progress import Display, display
from pipeloom.train.process_group import Group, join
from pipeloom.train.run_parts import make_run_parts
from pipeloom.train.stream_steps import StreamSteps


def train(config: TrainConfig, member: Membership | None) -> None:
    """Train as one rank of `member`'s run, or as all ranks in this process; `validate` has passed.

    Raises:
        RunError: a loss or gradient that is not finite, a lost rank, a model that raises.
    """
    with ExitStack() as stack:
        group = stack.enter_context(join(member, config))
        checkpoint = resume.agreed_checkpoint(config, group)
        note = None
        if config.parallel.slices == AUTO:
            from pipeloom.train.measured_slices import choose_slices  # here: imports the planner

            config, note = choose_slices(config, group, checkpoint)
        vocabulary_size = load_tokenizer(config.data.tokenizer).vocabulary_size
        config, choice = under_cap(config, vocabulary_size, device=group.device.type)
        trainer = stack.enter_context(Trainer(config, group, member))
        done = trainer.resume(checkpoint)
        try:
            with display(shown=group.rank == 0, num_steps=config.steps, done=done, log_steps=config.log_steps) as shown:
                trainer.open_output(shown)
                if note:
                    shown.say(note)
                if choice is not None:
                    shown.say(f"under memory.cap: {chosen_words(config)}")
                for first, last in _stretches(done, config):
                    for row in trainer.steps(first, last, shown):
                        shown.step(row)
                    if _is_due(last, config.eval_steps, config.steps):
                        shown.say(f"step {last}  validation loss {trainer.evaluate(last):.4f}")
                    if _is_due(last, config.save_steps, config.steps):
                        shown.say(f"step {last}  saved {trainer.save(last)}")
            trainer.report(shown)
            if config.sample_tokens:
                shown.say(f"sample:\n{trainer.sample()}")
        except InputError as error:  # options are valid: now it is a failure, such as a full disk
            raise RunError(str(error)) from error


def _stretches(done: int, config: TrainConfig) -> Iterator[tuple[int, int]]:
    """First and last steps of the stretches between evaluations and checkpoints."""
    first = done + 1
    for step in range(first, config.steps + 1):
        if step == config.steps or any(_is_due(step, n, config.steps) for n in (config.eval_steps, config.save_steps)):
            yield first, step
            first = step + 1


def _is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


class Trainer:
    """One process's part of a run.

    Steps count from 1: step N is the Nth update, and checkpoint-N the state after it.
    """

    def __init__(self, config: TrainConfig, group: Group, member: Membership | None) -> None:
        self.config, self.group = config, group
        self._launched = member is not None and member.black_box is not None
        self._held = ExitStack()
        self.run = make_run_parts(config, group, member.black_box if member else None)
        self._probe = MemoryProbe(
            self.run.pipeline, self.run.optimizer, self.run.config_of_stages, group, self.run.corpus.vocabulary_size
        )
        streams = self.run.schedule.microbatches_per_update is not None
        self._steps = StreamSteps(self.run) if streams else FlushSteps(self.run, self._probe)
        self._resumed: Path | None = None
        self._first_step = 1

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.run.pipeline.close()
        if isinstance(self.run.optimizer, OffloadedOptimizer):
            self.run.optimizer.close()
        self._held.close()

    def resume(self, checkpoint: Path | None) -> int:
        """Load the checkpoint, if any; returns the number of completed steps."""
        resume.seed_generators(self.config.seed, 0, self.group.rank)
        self._resumed = checkpoint
        if checkpoint is None:
            return 0
        self.run.journal.enter(f"loading {checkpoint}")
        done = resume.load(self.run, checkpoint).step
        self._first_step = done + 1
        self._steps.done = done
        return done

    def open_output(self, shown: Display) -> None:
        """Prepare the output directory and show the settings of the run."""
        output_dir, corpus, schedule = self.run.output_dir, self.run.corpus, self.run.schedule
        if self.group.rank == 0:
            if not self._launched:  # else the launcher holds it
                self._held.enter_context(in_use(output_dir))
            with writing(output_dir):
                moved = prepare_output(self.config, self._resumed, self._first_step - 1)
            if moved:
                shown.say(moved)
        self.group.all_gather(b"")  # no process saves or logs before the directory is ready
        sizes = self.config.gpt(corpus.vocabulary_size)
        start = f", from {self._resumed}" if self._resumed else ""
        shown.say(
            f"{sizes.num_parameters:,} parameters in {schedule.num_stages} stages, schedule {schedule.name}, "
            f"{self._ranks_text()}, {counted(self.config.num_microbatches, 'micro-batch')} per step; "
            f"{found_text(corpus)}{start}"
        )
        for line in self.run.notices:
            shown.say(line)

    def _ranks_text(self) -> str:
        """``4 ranks``, or ``2 replicas of 4 ranks (zero2)``, and a number format other than float32."""
        degree, dtype = self.group.data_degree, self.config.precision.dtype
        text = counted(self.run.pipeline.schedule.num_ranks, "rank")
        if degree > 1:
            text = f"{degree} replicas of {text} ({self.config.parallel.data_strategy})"
        return text if dtype == "fp32" else f"{text} in {dtype}"

    def steps(self, first: int, last: int, shown: Display) -> Iterator[dict[str, Any]]:
        """Updates `first` to `last`, after which nothing is in flight; the metrics of each as they become final."""
        count, size, start = last - first + 1, self.config.batch.size, self.run.samples_seen
        batches = (self._batch(start + k * size) for k in range(count))
        yield from self._steps.run(batches, count, shown.live)
        self.run.samples_seen = start + count * size

    def evaluate(self, step: int) -> float:
        """The mean loss over the validation batches; gradients, modes and random states stay as they are."""
        self.run.journal.enter(f"evaluation after step {step}")
        batches = self.run.corpus.validation_batches(
            self.config.model.sequence_length, self.config.batch.size, self.config.eval_batches
        )
        losses = [float(self.run.pipeline.evaluate(*self._placed(inputs, targets))) for inputs, targets in batches]
        mean = statistics.fmean(losses)
        self.run.journal.write({"step": step, "eval_loss": mean})
        return mean

    def save(self, step: int) -> Path:
        """Write ``checkpoint-{step}``."""
        self.run.journal.enter(f"checkpoint after step {step}")
        return resume.save(self.run, step)

    def report(self, shown: Display) -> None:
        """Rank 0 writes the timelines of the last step, measured and predicted, and the report."""
        self.run.journal.enter("report")
        if self._first_step > self.config.steps:
            return
        output_dir = self.run.output_dir
        self._probe.write(output_dir)
        timelines = self._steps.timelines()
        if timelines is not None:
            measured, predicted = timelines
            write_timelines(output_dir, measured=measured, predicted=predicted)
            shown.say(f"report: {write_report(output_dir)}")

    def sample(self) -> str:
        """A short text that the model generates."""
        self.run.journal.enter("sample")
        pipeline = self.run.pipeline
        pipeline.state.refresh()
        sharded = self.config.shared is not None and self.config.parallel.data_strategy == "zero3"
        return generate(
            self.run.stages,
            self.run.schedule.placement,
            self.group,
            self.run.corpus.tokenizer,
            prompt=self.config.sample_prompt,
            num_tokens=self.config.sample_tokens,
            sequence_length=self.config.model.sequence_length,
            temperature=self.config.sample_temperature,
            seed=self.config.seed,
            transport=self.run.transport,
            through=pipeline if sharded else None,
        )

    def _batch(self, samples_seen: int) -> tuple[Tensor | None, Tensor | None]:
        """This process's part of the batch that starts after `samples_seen` samples."""
        windows = self.run.sampler.batch(samples_seen, self.config.batch.size)
        return self._placed(*self.run.corpus.windows(windows, self.config.model.sequence_length))

    def _placed(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """This process's part of a global batch, on its device."""
        device, pipeline = self.group.device, self.run.pipeline
        own = samples_of_replica(len(inputs), self.group.replica, self.group.data_degree)
        return (
            inputs[own.start : own.stop].to(device) if pipeline.needs_inputs else None,
            targets[own.start : own.stop].to(device) if pipeline.needs_targets else None,
        )
