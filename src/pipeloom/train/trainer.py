"""`Trainer`: one process of a run of `pipeloom train`."""

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map

from pipeloom.common.process_place import place_of, write_places
from pipeloom.common.quantities import counted
from pipeloom.data.corpus import Part
from pipeloom.parallel import OffloadedOptimizer
from pipeloom.processes.launcher import Membership
from pipeloom.report import write_report
from pipeloom.train import run_checkpoints
from pipeloom.train.checkpoint.directory import in_use
from pipeloom.train.checkpoint.reader import Checkpoint
from pipeloom.train.config.schedule import process_names, samples_of_replica
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.samples import Samples
from pipeloom.train.data.written import MODEL_DIR
from pipeloom.train.fine_tuning.saving import save_pretrained
from pipeloom.train.flush_steps import FlushSteps
from pipeloom.train.generation import generate
from pipeloom.train.memory_probe import MemoryProbe
from pipeloom.train.output.directory import prepare_output, write_timelines, writing
from pipeloom.train.output.display import Display
from pipeloom.train.output.reporters import Reporters, entry_of
from pipeloom.train.output.saves import Saves
from pipeloom.train.process_group import Group
from pipeloom.train.recovery.run_recovery import RunRecovery
from pipeloom.train.recovery.state_copies import StateCopy
from pipeloom.train.run_parts import RunParts, TokenBatch
from pipeloom.train.stream_steps import StreamSteps
from pipeloom.transport.values import MicroBatches


class Trainer:
    """One process's part of a run.

    Steps count from 1: step N is the Nth update, and checkpoint-N the state after it.

    Args:
        config, group: of the run.
        member: see `train`.
        recovery: what this process keeps if another one is lost.
        samples: the data, if it is open already.
    """

    def __init__(
        self,
        config: TrainConfig,
        group: Group,
        member: Membership | None,
        recovery: RunRecovery | None = None,
        samples: Samples | None = None,
    ) -> None:
        self.config, self.group, self._recovery = config, group, recovery
        self._launched = member is not None and member.launched
        # What ``config.yaml`` has: an elastic run may have another layout for now.
        given = member.configured if member is not None else None
        self._configured = config if given is None else TrainConfig.from_json(given)
        self._held = ExitStack()
        if samples is None and recovery is not None:
            samples = recovery.samples
        self.run = RunParts(config, group, samples)
        self._probe = MemoryProbe(self.run)
        streams = self.run.schedule.microbatches_per_update is not None
        agreement = None if recovery is None else recovery.agreement
        self._steps = StreamSteps(self.run) if streams else FlushSteps(self.run, self._probe, agreement)
        self.saves = Saves(self.run)
        self._resumed: Path | None = None
        self._first_step = 1
        self._samples_before = (1, 0)  # a step, and the samples seen until it began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(self._steps, StreamSteps):
            self._steps.stop.close()
        self.saves.close()
        self.run.pipeline.close()
        self.run.journal.close()
        if isinstance(self.run.optimizer, OffloadedOptimizer):
            self.run.optimizer.close()
        self._held.close()

    @property
    def done(self) -> int:
        """The number of completed steps, over all runs."""
        return self._steps.done

    def resume(self, start: Path | StateCopy | Checkpoint | None) -> int:
        """Load a checkpoint or a copy in memory, if any; returns the number of completed steps."""
        run_checkpoints.seed_generators(self.config.seed, 0, self.group.seed_rank)
        if start is None:
            return 0
        if isinstance(start, StateCopy | Checkpoint):
            self.run.journal.enter(f"loading the copy of step {start.step}")
            run_checkpoints.restore(self.run, start)
            done = start.step
        else:
            self.run.journal.enter(f"loading {start}")
            done, self._resumed = run_checkpoints.load(self.run, start).step, start
        self._first_step = done + 1
        self._steps.done = done
        self._samples_before = self._first_step, self.run.samples_seen
        return done

    def open_output(self, shown: Display, row: Mapping[str, Any]) -> None:
        """Prepare the output directory and show the settings of the run, unless a recovery has shown them before.

        Args:
            shown: takes the lines.
            row: metrics of the last step, which may be missing after a recovery; or empty.
        """
        output_dir, recovery = self.run.output_dir, self._recovery
        communicators = self.group.communicators()
        environment = {} if communicators is None else {"NCCL": communicators}
        if communicators is not None:
            self.run.notices.append(f"NCCL: {communicators}, which memory forecasts and peaks do not count")
        if self.group.rank == 0:
            if not self._launched:  # else the launcher holds it
                self._held.enter_context(in_use(output_dir))
            with writing(output_dir):
                goes_on = recovery is not None and recovery.copies.first_step is not None
                moved, written = prepare_output(
                    self._configured, self._resumed, self._first_step - 1, goes_on=goes_on, environment=environment
                )
            if moved:
                shown.say(moved)
            names, options = self.config.reporters, self.config.to_mapping()
            self.run.journal.reporters = Reporters(names, output_dir, options, self._first_step - 1, written)
            if row and entry_of(row) not in written:
                self.run.journal.write(row)
        # No process saves or logs before the directory is ready.
        name = "all ranks" if self.group.size == 1 else process_names(self.config)[self.group.rank]
        places = self.group.gather_json(place_of(name, self.group.black_box.descriptor))
        if recovery is not None:
            recovery.copies.begin(self._first_step - 1)
        if self.group.rank == 0:
            with writing(output_dir):
                write_places(output_dir, places)
        if recovery is None or recovery.loss is None:
            self._show_settings(shown)

    def _show_settings(self, shown: Display) -> None:
        config, degree, schedule = self.config, self.group.data_degree, self.run.schedule
        ranks = counted(schedule.num_ranks, "rank")
        if degree > 1:
            ranks = f"{degree} replicas of {ranks} ({config.parallel.data_strategy})"
        inside = config.parallel
        if inside.tensor > 1:
            ranks += f", tensor {inside.tensor} ({inside.tensor_layout}{', sequence' if inside.sequence else ''})"
        if inside.context > 1:
            ranks += f", context {inside.context} ({inside.context_kind})"
        if inside.expert > 1:
            ranks += f", expert {inside.expert}"
        if config.precision.dtype != "fp32":
            ranks += f" in {config.precision.dtype}"
        start = f", from {self._resumed}" if self._resumed else ""
        shown.say(
            f"{self.run.num_parameters} in {schedule.num_stages} stages, schedule {schedule.name}, {ranks}, "
            f"{counted(config.num_microbatches, 'micro-batch')} per step; {self.run.samples.found}{start}"
        )
        for line in self.run.notices:
            shown.say(line)

    def steps(self, first: int, last: int, shown: Display) -> Iterator[dict[str, Any]]:
        """Updates `first` to `last`, after which nothing is in flight; the metrics of each as they become final.

        They end earlier, after the same step on all processes, where a signal asks for it.
        """
        count, size, start = last - first + 1, self.config.batch.size, self.run.samples_seen
        self._samples_before = first, start

        def batches() -> Iterator[TokenBatch]:
            for step in range(first, last + 1):
                if self._recovery is not None:
                    self._recovery.step_begins(step)
                yield self._batch(self.run.sampler.batch(start + (step - first) * size, size))

        for row in self._steps.run(batches(), count, shown.live):
            if self._recovery is not None:
                self._recovery.step_ends()
            yield row
        self.run.samples_seen = self.samples_seen(self.done)

    def samples_seen(self, step: int) -> int:
        """The samples seen until the end of `step`, one of those that `steps` makes, or the one before them."""
        first, start = self._samples_before
        return start + (step - first + 1) * self.config.batch.size

    def evaluate(self, step: int) -> float:
        """The mean loss over the labels of the validation batches; gradients, modes and random states stay."""
        self.run.journal.enter(f"evaluation after step {step}")
        samples, config = self.run.samples, self.config
        batches = list(samples.validation_batches(config.batch.size, config.eval_batches))
        losses = [float(self.run.pipeline.evaluate(*self._batch(each, "validation")[:2])) for each in batches]
        mean = statistics.fmean(losses, [samples.num_labels(each, "validation") for each in batches])
        self.run.journal.write({"step": step, "eval_loss": mean})
        return mean

    def report(self, shown: Display) -> None:
        """Rank 0 writes the timelines of the last step, measured and predicted, and the report."""
        self.run.journal.enter("report")
        self.run.journal.flush()
        if self._first_step > self.config.steps:  # a run that was complete; a process may have been lost before this
            recovered = self._recovery is not None and (self._recovery.entered or self._recovery.loss is not None)
            if recovered and self.group.rank == 0 and (self.run.output_dir / "metrics.jsonl").exists():
                shown.say(f"report: {write_report(self.run.output_dir)}")
            return
        self._probe.write(needed=True)
        timelines = self._steps.timelines()
        if timelines is not None:
            write_timelines(self.run.output_dir, *timelines)
            shown.say(f"report: {write_report(self.run.output_dir)}")

    def sample(self) -> str:
        """A short text that the model generates."""
        self.run.journal.enter("sample")
        pipeline = self.run.pipeline
        pipeline.state.refresh()
        shared = self.config.shared
        sharded = shared is not None and shared.kind.shards_parameters
        return generate(
            self.config,
            self.run.stages,
            self.run.schedule.placement,
            self.group,
            self.run.samples.tokenizer,
            through=pipeline if sharded else None,
        )

    def save_model(self) -> Path:
        """Write the fine-tuned model, or its adapters, as a Hugging Face directory; every process calls it."""
        self.run.journal.enter("model")
        out = self.run.output_dir / MODEL_DIR
        with writing(out):
            save_pretrained(self.run, out)
        return out

    def _batch(self, indices: NDArray[np.int64], part: Part = "train") -> TokenBatch:
        """This process's part of a global batch, on its device."""
        pipeline, samples = self.run.pipeline, self.run.samples
        num_tokens = samples.num_tokens(indices, part)
        if not (pipeline.needs_inputs or pipeline.needs_targets):
            return TokenBatch(None, None, num_tokens)
        own = samples_of_replica(len(indices), self.group.replica, self.group.data_degree)
        inputs, targets = samples.batch(indices[own.start : own.stop], self.config.num_microbatches, part)
        return TokenBatch(
            _on(self.group.device, inputs) if pipeline.needs_inputs else None,
            _on(self.group.device, targets) if pipeline.needs_targets else None,
            num_tokens,
        )


def _on(device: torch.device, value: Any) -> Any:
    """The value with its tensors on a device."""
    if isinstance(value, MicroBatches):
        return MicroBatches(_on(device, each) for each in value)
    return tree_map(lambda tensor: tensor.to(device), value)
