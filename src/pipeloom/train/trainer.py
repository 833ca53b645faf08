"""`Trainer`: one process's part of a run, step by step. `pipeloom.train.loop` is the loop around it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from pipeloom.common.quantities import counted
from pipeloom.models import loss_fn
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.processes.launcher import Membership
from pipeloom.report import write_report
from pipeloom.train import resume
from pipeloom.train.build_stages import build_stages, with_known_cut
from pipeloom.train.config.data_parallel import share
from pipeloom.train.config.memory_options import activations_away, offload_notices, shared, states_away
from pipeloom.train.config.schedule_choice import make_schedule
from pipeloom.train.config.slice_lengths import slice_lengths
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.config.validate import open_corpus
from pipeloom.train.data.sampler import Sampler
from pipeloom.train.flush_steps import FlushSteps
from pipeloom.train.generate import generate
from pipeloom.train.link_costs import measure_data_costs
from pipeloom.train.optimizers import make_optimizer
from pipeloom.train.output.directory import in_use, prepare_output, write_timelines, writing
from pipeloom.train.output.journal import Journal
from pipeloom.train.output.measured_memory import MemoryProbe
from pipeloom.train.output.notices import found_text, skipped_notice
from pipeloom.train.output.progress import Display
from pipeloom.train.output.step_metrics import Predictor
from pipeloom.train.process_group import Group
from pipeloom.train.run_parts import RunParts
from pipeloom.train.stream_steps import StreamSteps
from pipeloom.training import LossScaler, Pipeline


class Trainer:
    """One process's part of a run.

    Steps count from 1: step N is the Nth update, and checkpoint-N what is there after it.
    """

    def __init__(self, config: TrainConfig, group: Group, member: Membership | None) -> None:
        self.config = config
        self.group = group
        self.black_box = member.black_box if member else None
        self.output_dir = Path(config.output_dir)
        self._journal = Journal(self.black_box, self.output_dir if group.rank == 0 else None)
        self._held = ExitStack()
        self._journal.enter("setup")
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
        shapes = {name: part.shape for name, part in self.pipe.state.ranges.items()}
        self.optimizer = make_optimizer(self.pipe.named_parameters(), config.optimizer, shapes)
        self.stepped = states_away(self.optimizer, config, group.device.type)
        scales = config.precision.dtype == "fp16"
        precision = config.precision
        self.scaler = LossScaler(precision.loss_scale, growth_steps=precision.loss_scale_steps) if scales else None
        predictor = Predictor(measure_data_costs(self.pipe, group))
        self.probe = MemoryProbe(
            self.pipe, self.stepped, with_known_cut(config, self.stages), group, self.corpus.vocabulary_size
        )
        parts = RunParts(
            pipeline=self.pipe,
            optimizer=self.stepped,
            predictor=predictor,
            config=config,
            group=group,
            journal=self._journal,
        )
        streams = self.schedule.microbatches_per_update is not None
        self._steps = StreamSteps(parts) if streams else FlushSteps(parts, self.scaler, self.probe)
        self.notices = skipped_notice(self.corpus.skipped) + offload_notices(config, group.device.type)
        self.resumed: Path | None = None
        self.first_step = 1

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.pipe.close()
        if isinstance(self.stepped, OffloadedOptimizer):
            self.stepped.close()
        self._held.close()

    def resume(self, checkpoint: Path | None) -> int:
        """Go on from a checkpoint where there is one; returns how many steps are done."""
        resume.seed_generators(self.config.seed, 0, self.group.rank)
        self.resumed = checkpoint
        if checkpoint is None:
            return 0
        self._journal.enter(f"loading {checkpoint}")
        done = resume.load(self, checkpoint).step
        self.first_step = done + 1
        self._steps.done = done
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
        sizes = self.config.gpt(self.corpus.vocabulary_size)
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
        text = counted(self.pipe.schedule.num_ranks, "rank")
        if copies > 1:
            text = f"{copies} copies of {text} ({self.config.parallel.data_strategy})"
        return text if dtype == "fp32" else f"{text} in {dtype}"

    def steps(self, first: int, last: int, shown: Display) -> Iterator[dict[str, Any]]:
        """Updates `first` to `last`, after which nothing is in flight; the metrics of each as they become final."""
        count, size, start = last - first + 1, self.config.batch.size, self.samples_seen
        batches = (self._batch(start + k * size) for k in range(count))
        yield from self._steps.run(batches, count, shown.live)
        self.samples_seen = start + count * size

    def evaluate(self, step: int) -> float:
        """The mean loss over the validation batches; gradients, modes and random states stay as they are."""
        self._journal.enter(f"evaluation after step {step}")
        batches = self.corpus.validation_batches(
            self.config.model.sequence_length, self.config.batch.size, self.config.eval_batches
        )
        losses = [float(self.pipe.evaluate(*self._placed(inputs, targets))) for inputs, targets in batches]
        mean = statistics.fmean(losses)
        self._journal.write({"step": step, "eval_loss": mean})
        return mean

    def save(self, step: int) -> Path:
        """Write ``checkpoint-{step}``."""
        self._journal.enter(f"checkpoint after step {step}")
        return resume.save(self, step)

    def report(self, shown: Display) -> None:
        """Rank 0 writes the timelines of the last step, measured and predicted, and the report."""
        self._journal.enter("report")
        if self.first_step > self.config.steps:
            return
        self.probe.write(self.output_dir)
        timelines = self._steps.timelines()
        if timelines is not None:
            measured, predicted = timelines
            write_timelines(self.output_dir, measured=measured, predicted=predicted)
            shown.say(f"report: {write_report(self.output_dir)}")

    def sample(self) -> str:
        """A short text that the model writes."""
        self._journal.enter("sample")
        self.pipe.state.refresh()
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
