"""`RunRecovery`: what a process of `pipeloom train` keeps when its run recovers from the loss of a rank."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import counted
from pipeloom.errors import CheckpointError
from pipeloom.processes.recovery.lifeline import Loss, Memories
from pipeloom.processes.recovery.notes import Notes
from pipeloom.processes.rendezvous import cut_connections
from pipeloom.train import run_checkpoints
from pipeloom.train.checkpoint.directory import checkpoint_path, latest
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.checkpoint.reader import Checkpoint
from pipeloom.train.checkpoint.resume import find_good
from pipeloom.train.config.schedule import is_stream, process_names, schedule_name
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.samples import Samples
from pipeloom.train.output.directory import read_entries
from pipeloom.train.process_group import Group
from pipeloom.train.recovery.partner_copies import PartnerCopies, receivers_of
from pipeloom.train.recovery.state_copies import StateCopies, StateCopy
from pipeloom.train.recovery.step_agreement import StepAgreement
from pipeloom.train.run_parts import RunParts


class Restart(NamedTuple):
    """Where all processes go on after a recovery.

    Attributes:
        source: a copy, a checkpoint (of ranks of another layout also one in memory), or None for the beginning.
        step: that is complete there.
        again: how many steps that had begun are trained once more.
        unsaved: whether the newest checkpoint that was due by `step` was lost while it was written.
        unevaluated: whether the evaluation that is due after `step` was lost.
        row: the metrics of `step`, which rank 0 may have lost; empty: it has not.
        words: the source in a sentence.
    """

    source: Path | StateCopy | Checkpoint | None
    step: int
    again: int
    unsaved: bool
    unevaluated: bool
    row: Mapping[str, Any]
    words: str


class _Row(NamedTuple):
    """What one process has for a recovery.

    Attributes:
        steps: after which it has copies of its state.
        begun: the last step that it has begun.
        first: after which step the run began; None: it had not begun.
        held: rank -> after which steps it has copies of that rank's state, which are sent back to it.
        enters: whether it has `RunRecovery.entry`.
        lends: whether replicas of its rank have the same state, but for random generators.
        random_steps: after which the generators of its rank are known.
        row: the metrics of its last complete step.
    """

    steps: list[int]
    begun: int
    first: int | None
    held: dict[str, list[int]]
    enters: bool
    lends: bool
    random_steps: list[int]
    row: dict[str, Any]


class RunRecovery:
    """What one process keeps, beside its parts of the run, which it makes anew after a loss.

    Args:
        config: of the run.
        memories: by rank: of all ranks; or on several machines of this one, and of those whose copies it holds.
        rank: of this process.
        others: sockets of this process that no process group has made.
        near: processes per machine; None: all are on one.

    Attributes:
        copies: of this process's state.
        agreement: with the other processes, about the step in which a rank is lost; None: the run has no replicas
            with the state of each rank.
        loss: the loss after which this process has joined the others; None: it is there from the start.
        partners: where each copy has a twin on another machine; None: all processes are on one machine.
        entry: where an elastic run goes on with new ranks, until all of them have begun.
        entered: whether the run went on there.
        start: where the run goes on after a loss or with new ranks, until it does; None: it begins.
        begun: the last step that this process has begun.
        samples: the data of the run, once it is open.
        notices: lines to show about damaged checkpoints.
    """

    def __init__(
        self,
        config: TrainConfig,
        memories: Mapping[int, Memories],
        rank: int,
        others: Collection[str],
        near: int | None = None,
    ) -> None:
        self._every, self._save_steps = config.copy_steps, config.save_steps
        self._streams = is_stream(schedule_name(config))
        self._config, self._output_dir = config, Path(config.output_dir)
        self._memories, self._rank = memories, rank
        self.copies = StateCopies(memories[rank].copies)
        self.agreement: StepAgreement | None = None
        self.partners: PartnerCopies | None = None
        size = config.num_processes
        if near is not None and near < size:
            held = {each: StateCopies(found.copies) for each, found in memories.items() if each != rank}
            self.partners = PartnerCopies(rank, size, near, self.copies, held)
        elif config.has_peers and not self._streams and config.optimizer.barrier:
            notes = [Notes(memories[each].notes) for each in range(len(memories))]
            self.agreement = StepAgreement(notes, rank, lambda: cut_connections(others))
        self.loss: Loss | None = None
        self.entry: Restart | None = None
        self.start: Restart | None = None
        self.entered = False
        self.begun = self.copies.begun
        self.samples: Samples | None = None
        self.notices: list[str] = []

    def is_due(self, step: int) -> bool:
        """Whether the steps are interrupted after `step` for a copy; a stream, which would drain, is not."""
        return bool(self._every) and step % self._every == 0 and not self._streams

    def begin(self, run: RunParts, step: int) -> Restart | None:
        """Make the first copy, of the state after `step`; a collective call, after which all processes have one.

        Returns:
            `start` without its source, whose memory is no longer needed.
        """
        start = self.start
        if start is not None:
            self.start = start._replace(source=None)
        self.samples = run.samples
        if self.agreement is not None:
            self.agreement.begin(step, whole=_is_whole(run))
        if start is None:  # earlier copies are of before a rewind
            self._drop_after(-1)
        has_copy = start is not None and isinstance(start.source, StateCopy) and step in self.copies.steps
        if self._every and not has_copy:
            self._copy(run, step)
        elif self._every and self.partners is not None:
            self.partners.exchange(step)  # the next machine may be a new one
        run.group.all_gather(b"")
        self.copies.note_begun(step)
        self.start = self.entry = None
        if not self._every:  # copies that replicas lent
            self.copies.release()
        if self.partners is not None:
            self.partners.release_others()
        return None if start is None else start._replace(source=None)

    def ended(self, begun: int) -> None:
        """The steps have ended, the last that had begun is `begun`, or the run has not gone on after a loss."""
        if self.start is None:
            self.begun = begun

    def step_begins(self, step: int) -> None:
        """The batch of a step is asked for."""
        self.copies.note_begun(step)

    def step_ends(self) -> None:
        """A step is complete."""
        self.copies.note_time()

    def forget(self) -> None:
        """The run is about to go back: neither copies count nor the states that ranks have now."""
        self._drop_after(-1)
        if self.agreement is not None:
            self.agreement.forget()

    def remember(self, run: RunParts, step: int) -> None:
        """After `forget`, the run does not go back: its state after `step` counts."""
        if self.agreement is not None:
            self.agreement.begin(step, whole=_is_whole(run))
        if self._every:
            self._copy(run, step)

    def copy_if_due(self, run: RunParts, step: int) -> None:
        """Copy the state after `step`, between two steps; of a stream whenever it has drained."""
        if self.is_due(step) or (self._streams and self._every):
            self._copy(run, step)

    def _copy(self, run: RunParts, step: int) -> None:
        run.journal.enter(f"copy of step {step} in memory")
        self.copies.write(step, run_checkpoints.contents(run))
        if self.partners is not None:
            self.partners.exchange(step)

    def _drop_after(self, step: int) -> None:
        self.copies.drop_after(step)
        if self.partners is not None:
            self.partners.drop_after(step)

    def keep(self, run: RunParts, samples_seen: Callable[[int], int]) -> None:
        """After an error in the steps, copy the state after the last complete one, where replicas can take it.

        Args:
            run: of this process.
            samples_seen: until the end of a step.
        """
        if self.agreement is None:
            return
        step = self.agreement.complete
        self.agreement.stop()
        random = self.agreement.random(step)
        self.agreement.keep_row()
        known = self.agreement.whole and not self.agreement.updating and random is not None
        if known and step not in self.copies.steps:
            run.samples_seen = samples_seen(step)
            with suppress(RuntimeError):  # no memory, or a device that has failed: older copies and checkpoints remain
                contents = {**run_checkpoints.contents(run), "random": random, "row": dict(self.agreement.row)}
                self.copies.write(step, contents)

    def restart(self, group: Group) -> Restart | None:
        """Where all processes go on, a collective call; None: as if the run had not begun."""
        noted = self.agreement
        of_notes = (False, [], {}) if noted is None else (noted.whole, noted.random_steps, noted.row)
        held: dict[str, list[int]] = {}
        if self.partners is not None:
            self.partners.number_recovery(group.gather_json)
            held = {str(rank): steps for rank, steps in self.partners.held_steps.items()}
        enters = self.entry is not None
        own = _Row(self.copies.steps, self.begun, self.copies.first_step, held, enters, *of_notes)
        rows = [_Row(*row) for row in group.gather_json(own)]
        if (first := next((row.first for row in rows if row.first is not None), None)) is None:
            return None
        self.copies.begin(first)  # the memory of a new machine is empty
        begun = max(row.begun for row in rows)
        if self.partners is not None:
            self._give_back(self.partners, rows)
        sources = [_sources(rank, rows, group) for rank in range(group.size)]
        common = max(set.intersection(*(set(found) for found in sources)), default=-1)
        saved_step = group.gather_json(self._saved_step(common) if group.rank == 0 else None)[0]
        step = max(common, saved_step)
        source: Path | StateCopy | Checkpoint | None
        if self.entry is not None and step < self.entry.step and all(row.enters for row in rows):
            return self.enter(group)
        if step < 0:  # neither copies nor checkpoints yet
            source = run_checkpoints.agreed_checkpoint(self._config, group)
            step = 0 if source is None else read_manifest(source).step
            words = "the beginning" if source is None else str(source)
        elif common == step:
            source = self._read(step, sources[group.rank][step])
            lent = {rank: each[step] for rank, each in enumerate(sources) if each[step] != rank}
            words = self._words(step, lent)
        else:
            source = checkpoint_path(self._output_dir, step)
            words = str(source)
        row_of_copy = source.row if isinstance(source, StateCopy) else {}
        self._drop_after(step)
        return Restart(
            source,
            step,
            max(0, begun - step),
            unsaved=self._unsaved(step, max(first, saved_step)),
            unevaluated=self._unevaluated(group, first, step),
            row=next((row.row for row in rows if row.row.get("step") == step), row_of_copy),
            words=words,
        )

    def _saved_step(self, common: int) -> int:
        """The step of the newest checkpoint, of which every byte is compared if it is behind the copies; -1: none.

        Damaged ones are passed over, with a line each, and kept under other names.
        """
        newest = _step_of(latest(self._output_dir))
        if newest <= common:
            return newest
        try:
            key = CheckpointKey.read(self._config.checkpoint_key_file)
            good = find_good("auto", self._output_dir, leads=True, key=key)
        except CheckpointError as error:  # none is whole: the copies remain
            self.notices.append(f"{error.__cause__ or error} It is passed over.")
            return -1
        self.notices += good.notices if good is not None else []
        return -1 if good is None else good.manifest.step

    def _give_back(self, holders: PartnerCopies, rows: Sequence[_Row]) -> None:
        """Give ranks without it their copy of the newest step of which every rank has one, or another rank for it."""
        held = [{int(rank): steps for rank, steps in row.held.items()} for row in rows]
        all_steps = (
            {*row.steps, *(step for each in held for step in each.get(rank, ()))} for rank, row in enumerate(rows)
        )
        if common := set.intersection(*all_steps):
            receivers = receivers_of(max(common), [row.steps for row in rows], held)
            holders.give_back(max(common), receivers)
            for rank in receivers:
                rows[rank].steps.append(max(common))

    def enter(self, group: Group) -> Restart | None:
        """`entry`, with what was due after its step and is not done yet; a collective call."""
        entry = self.entry
        if entry is None:
            return None
        self.entered = True
        newest = latest(self._output_dir) if group.rank == 0 else None
        first, saved_step = group.gather_json([self.copies.first_step, _step_of(newest)])[0]
        return entry._replace(
            unsaved=self._unsaved(entry.step, max(first, saved_step)),
            unevaluated=self._unevaluated(group, first, entry.step),
        )

    def _read(self, step: int, rank: int) -> StateCopy:
        """The copy of this process's state; where another rank has it, with the generators of this one."""
        if rank == self._rank:
            return self.copies.read(step)
        copy = StateCopies(self._memories[rank].copies).read(step)
        random = self.agreement.random(step) if self.agreement else None
        assert random is not None
        return copy.with_random(random)

    def _words(self, step: int, lent: Mapping[int, int]) -> str:
        if not lent:
            return f"the copies in memory of step {step}"
        names = process_names(self._config)
        rank, other = next(iter(lent.items()))
        more = f" and {counted(len(lent) - 1, 'more rank')} likewise" if len(lent) > 1 else ""
        return f"the end of step {step}, {names[rank]} with the state of {names[other]}{more}"

    def _unsaved(self, step: int, known: int) -> bool:
        """Whether a checkpoint was due by `step`, after step `known` that has one or needs none."""
        if not self._save_steps:
            return False
        due = step if step == self._config.steps else step - step % self._save_steps
        return due > known

    def _unevaluated(self, group: Group, first: int, step: int) -> bool:
        every = self._config.eval_steps
        due = bool(every) and step > first and (step % every == 0 or step == self._config.steps)
        wrote = group.rank == 0 and due and (step, True) in read_entries(self._output_dir)
        return due and not group.gather_json(wrote)[0]

    def lines(self, restart: Restart) -> list[str]:
        """What to show of a recovery, or of the first step with another layout."""
        again, notices = counted(restart.again, "step"), self.notices
        self.notices = []
        if self.loss is None:
            return [*notices, f"step {restart.step}  goes on from {restart.words} with this layout; {again} again"]
        return [
            *notices,
            f"step {restart.step}  recovered: {self.loss.text}; all ranks went back to {restart.words}; "
            f"{again} again, {time.monotonic() - self.loss.at:.1f} s",
        ]


def _step_of(saved: Path | None) -> int:
    """The step of a checkpoint; -1: there is none."""
    return -1 if saved is None else int(saved.name.rpartition("-")[2])


def _is_whole(run: RunParts) -> bool:
    """Whether each data-parallel replica has the whole state of a rank: parameters, and no other state of its own."""
    named = {name for name, _ in run.pipeline.named_parameters()}
    parts = run.pipeline.state.ranges.values()
    whole = all(part.is_whole for part in parts) and not run.config.model.experts
    return whole and set(run_checkpoints.held(run)["model"]) <= named


def _sources(rank: int, rows: Sequence[_Row], group: Group) -> dict[int, int]:
    """The steps after which there is a copy of a rank's state, and whose it is: its own, or that of a replica."""
    found: dict[int, int] = {}
    if group.mesh is not None:
        shape = group.mesh.shape
        place = {**shape.coordinates(rank), "dp": 0}
        for other, row in enumerate(rows):
            if row.lends and {**shape.coordinates(other), "dp": 0} == place:
                found |= {step: other for step in row.steps if step in rows[rank].random_steps and step not in found}
    return found | dict.fromkeys(rows[rank].steps, rank)
