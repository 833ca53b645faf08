"""`RunRecovery`: what a process of `pipeloom train` keeps when its run recovers from the loss of a rank."""

import time
from pathlib import Path
from typing import NamedTuple

from pipeloom.common.quantities import counted
from pipeloom.processes.recovery.lifeline import Loss
from pipeloom.train import run_checkpoints
from pipeloom.train.checkpoint.directory import checkpoint_path, latest
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.config.schedule import is_stream, schedule_name
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.samples import Samples
from pipeloom.train.process_group import Group
from pipeloom.train.recovery.state_copies import StateCopies, StateCopy
from pipeloom.train.run_parts import RunParts


class Restart(NamedTuple):
    """Where all processes go on after a recovery.

    Attributes:
        source: a copy, a checkpoint, or None for the beginning.
        step: that is complete there.
        again: how many steps that had begun are trained once more.
        unsaved: whether the checkpoint that is due after `step` was lost while it was written.
    """

    source: Path | StateCopy | None
    step: int
    again: int
    unsaved: bool

    @property
    def words(self) -> str:
        """The source in a sentence."""
        if isinstance(self.source, StateCopy):
            return f"the copies in memory of step {self.step}"
        return "the beginning" if self.source is None else str(self.source)


class RunRecovery:
    """What one process keeps, beside its parts of the run, which it makes anew after a loss.

    Args:
        config: of the run.
        copies: of this process's state.

    Attributes:
        loss: the loss after which this process has joined the others; None: it is there from the start.
        begun: the last step that this process has begun.
        samples: the data of the run, once it is open.
    """

    def __init__(self, config: TrainConfig, copies: StateCopies) -> None:
        self._every, self._save_steps = config.copy_steps, config.save_steps
        self._streams = is_stream(schedule_name(config))
        self._config, self._output_dir = config, Path(config.output_dir)
        self.copies = copies
        self.loss: Loss | None = None
        self.begun = 0
        self.samples: Samples | None = None

    def is_due(self, step: int) -> bool:
        """Whether the steps are interrupted after `step` for a copy; a stream, which would drain, is not."""
        return bool(self._every) and step % self._every == 0 and not self._streams

    def begin(self, run: RunParts, step: int, restart: Restart | None) -> None:
        """Make the first copy, of the state after `step`; a collective call, after which all processes have one."""
        self.samples = run.samples
        if restart is None:  # earlier copies are of before a rewind
            self.copies.drop_after(-1)
        if self._every and step not in self.copies.steps:
            self._copy(run, step)
        run.group.all_gather(b"")

    def copy_again(self, run: RunParts, step: int) -> None:
        """Copy the state after `step`, where earlier copies were dropped and the run does not go back."""
        if self._every:
            self._copy(run, step)

    def copy_if_due(self, run: RunParts, step: int) -> None:
        """Copy the state after `step`, between two steps; of a stream whenever it has drained."""
        if self.is_due(step) or (self._streams and self._every):
            self._copy(run, step)

    def _copy(self, run: RunParts, step: int) -> None:
        run.journal.enter(f"copy of step {step} in memory")
        self.copies.write(step, run_checkpoints.contents(run))

    def restart(self, group: Group) -> Restart | None:
        """Where all processes go on, a collective call; None: as if the run had not begun."""
        rows = group.gather_json([self.copies.steps, self.begun, self.copies.first_step])
        if (first := rows[0][2]) is None:
            return None
        begun = max(row[1] for row in rows)
        common = max(set.intersection(*(set(row[0]) for row in rows)), default=-1)
        found = latest(self._output_dir) if group.rank == 0 else None
        saved = group.gather_json(found.name if found else "")[0]
        saved_step = int(saved.rpartition("-")[2]) if saved else -1
        step = max(common, saved_step)
        source: Path | StateCopy | None
        if step < 0:  # neither copies nor checkpoints yet
            source = run_checkpoints.agreed_checkpoint(self._config, group)
            step = 0 if source is None else read_manifest(source).step
        else:
            source = self.copies.read(step) if common == step else checkpoint_path(self._output_dir, step)
        self.copies.drop_after(step)
        due = bool(self._save_steps) and (step % self._save_steps == 0 or step == self._config.steps)
        return Restart(source, step, max(0, begun - step), due and max(first, saved_step) < step)

    def line(self, restart: Restart) -> str:
        """The line about a recovery."""
        assert self.loss is not None
        return (
            f"step {restart.step}  recovered: {self.loss.text}; all ranks went back to {restart.words}; "
            f"{counted(restart.again, 'step')} again, {time.monotonic() - self.loss.at:.1f} s"
        )
