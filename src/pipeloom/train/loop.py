"""`train`: the loop of `pipeloom train`: steps, evaluations, checkpoints, and another plan where one is chosen."""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pipeloom.errors import InputError, RunError
from pipeloom.parallel import run_threads
from pipeloom.processes.launcher import Membership
from pipeloom.processes.network.sockets import open_sockets
from pipeloom.processes.preemption import Preemption, allowed_seconds
from pipeloom.processes.recovery.keeper import Keeper
from pipeloom.processes.recovery.lifeline import Lifeline, Loss, Memories, Rerouted
from pipeloom.processes.rendezvous import leave, leaving_store
from pipeloom.train import run_checkpoints
from pipeloom.train.checkpoint.directory import checkpoint_path
from pipeloom.train.config.memory import chosen_words, under_cap
from pipeloom.train.config.train_config import AUTO, TrainConfig
from pipeloom.train.data.opening import run_tokenizer
from pipeloom.train.data.samples import Samples
from pipeloom.train.elastic.entry import entry_of
from pipeloom.train.fine_tuning.packing import check_packing
from pipeloom.train.machine.without_dynamo import without_dynamo
from pipeloom.train.output.display import Display, display
from pipeloom.train.output.rewinds import rewind
from pipeloom.train.process_group import Group, join, with_layout
from pipeloom.train.recovery.partner_copies import partners
from pipeloom.train.recovery.run_recovery import RunRecovery
from pipeloom.train.trainer import Trainer

if TYPE_CHECKING:
    from pipeloom.train.auto.run_planner import RunPlanner

_RESUME = "Resume with --resume_from_checkpoint auto."


class _Next(NamedTuple):
    """How a run goes on: its configuration, the checkpoint, and its data; None: opened anew."""

    config: TrainConfig
    checkpoint: Path
    samples: Samples | None


def train(config: TrainConfig, member: Membership | None) -> bool:
    """Train as one rank of `member`'s run, or as all ranks in this process; `validate` has passed.

    In this process, a thread acts as each process of the run where several share a stage.

    Returns:
        Whether a signal has ended the run before its last step, with a checkpoint.

    Raises:
        RunError: a loss or gradient that is not finite, a lost rank, a model that raises.
    """
    if not config.compile:
        without_dynamo()
    seconds = allowed_seconds(config.preempt_seconds, os.environ)
    rank, black_box = (member.rank if member else None), (member.black_box if member and member.launched else None)
    with Preemption(seconds, rank, black_box) as preemption:
        if config.num_threads > 1:
            run_threads(config.num_threads, lambda: _train(config, None, preemption))
        elif member is not None and member.lifeline is not None:
            _train_recovering(config, member, member.lifeline, preemption)
        elif member is not None and config.recover and not config.elastic:
            _train_again(config, member, preemption)
        else:
            _train(config, member, preemption)
    return preemption.saved is not None


def _train_recovering(config: TrainConfig, member: Membership, lifeline: Lifeline, preemption: Preemption) -> None:
    """Train as one rank; whenever another one is lost, leave all process groups, and meet the ranks anew."""
    others = open_sockets()
    recovery = RunRecovery(config, dict(enumerate(lifeline.memories)), member.rank, others)
    recovery.entry = entry_of(os.environ)
    meeting = member.meeting
    if lifeline.generation:
        meeting, recovery.loss = lifeline.meet()
    while True:
        try:
            _train(config, replace(member, meeting=meeting), preemption, recovery)
            return
        except Exception as error:
            if not lifeline.noticed(error):
                raise
        leave(others)  # here the error is gone, with all that its stack held
        if config.compile:
            torch.compiler.reset()  # the modules are made anew, which would count towards its limit of recompilations
        preemption.ask_again()
        meeting, recovery.loss = lifeline.meet()
        if lifeline.rerouted is not None:
            config, member, recovery = _rerouted(config, member, lifeline.rerouted, lifeline.memories, recovery, others)


def _rerouted(
    config: TrainConfig,
    member: Membership,
    told: Rerouted,
    memories: Sequence[Memories],
    before: RunRecovery,
    others: Collection[str],
) -> tuple[TrainConfig, Membership, RunRecovery]:
    """What this process goes on with, without the ranks that were lost."""
    configured = member.configured or config.to_json()
    config = TrainConfig.from_json(told.configuration)
    member = replace(member, rank=told.rank, world_size=config.num_processes, configured=configured)
    recovery = RunRecovery(config, dict(enumerate(memories)), told.rank, others)
    recovery.loss, recovery.begun, recovery.samples = before.loss, before.begun, before.samples
    return config, member, recovery


def _train_again(config: TrainConfig, member: Membership, preemption: Preemption) -> None:
    """Train as one rank under torchrun, which may have started all ranks again; a keeper has the agent's memory."""
    keeper, others = Keeper(), open_sockets()
    rank, near = member.rank, member.local_size
    memories = {each: keeper.memories(f"rank-{each}") for each in _kept_ranks(keeper, member)}
    recovery = RunRecovery(config, memories, rank, others, near)
    recovery.loss = Loss("torchrun started all ranks again", recovery.copies.begun_at or time.monotonic())
    _train(config, member, preemption, recovery)


def _kept_ranks(keeper: Keeper, member: Membership) -> set[int]:
    """The ranks whose memory this process reads: all of them on one machine; else its own, the one whose copies it
    holds, and, as the first process of its machine, those that the machine had before it had its ranks of now.
    """
    rank, size, near = member.rank, member.world_size, member.local_size
    if near == size:
        return {*range(size)}
    kept = {rank, partners(rank, size, near)[1]}
    if member.local_rank == 0:
        of_now = {each for other in range(rank, rank + near) for each in (other, partners(other, size, near)[1])}
        kept |= {int(name.removeprefix("rank-")) for name in keeper.names} - of_now
    return kept


def _train(
    config: TrainConfig, member: Membership | None, preemption: Preemption, recovery: RunRecovery | None = None
) -> None:
    with join(member, config, preemption) as group:
        planner = None
        if config.measures_plan or config.plan is not None:
            from pipeloom.train.auto.run_planner import RunPlanner  # here: imports the planner

            planner = RunPlanner(config, group)
        train_group(config, group, member, planner, recovery)


def train_group(
    config: TrainConfig,
    group: Group,
    member: Membership | None,
    planner: "RunPlanner | None",
    recovery: RunRecovery | None = None,
) -> None:
    """Train as one process of a group that exists.

    Args:
        config: of the run, perhaps with ``parallel.auto`` or schedule ``auto``.
        group: its processes; where the run measures its plan, not in a mesh yet.
        member: see `train`.
        planner: chooses the plan, and compares it with the steps; None without a plan.
        recovery: what this process keeps if another one is lost; None: then the run ends.
    """
    if recovery is not None:
        recovery.start = recovery.enter(group) if recovery.loss is None else recovery.restart(group)
        if recovery.start is None:
            recovery.loss = None  # before the run had begun
    goes_on = recovery is not None and recovery.start is not None
    checkpoint = None if goes_on else run_checkpoints.agreed_checkpoint(config, group)
    automatic = config.measures_plan
    if planner is not None:
        config = planner.first(checkpoint)
    samples: Samples | None = None
    while True:
        layout = with_layout(group, config) if automatic else group
        found = _train_on(config, layout, member, checkpoint, planner, recovery, samples)
        if found is None:
            return
        config, checkpoint, samples = found
        group.black_box.steps = 0.0  # the next steps warm up like those of a new process
        if config.compile:
            torch.compiler.reset()


def _train_on(
    config: TrainConfig,
    group: Group,
    member: Membership | None,
    checkpoint: Path | None,
    planner: "RunPlanner | None",
    recovery: RunRecovery | None,
    samples: Samples | None,
) -> _Next | None:
    """Train to the last step, or until another plan is better or a spike takes the run back."""
    note = None
    if config.parallel.slices == AUTO:
        from pipeloom.train.auto.measured_slices import choose_slices  # here: imports the planner

        config, note = choose_slices(config, group, checkpoint)
    choice = None
    if config.memory.cap is not None:
        vocabulary_size = run_tokenizer(config).vocabulary_size
        config, choice = under_cap(config, vocabulary_size, device=group.device.type)
    with Trainer(config, group, member, recovery, samples) as trainer, leaving_store(member):
        # The source is not kept: it may be memory that is freed once all ranks have read it.
        done = trainer.resume(checkpoint if recovery is None or recovery.start is None else recovery.start.source)
        restart = None if recovery is None else recovery.begin(trainer.run, done)
        if config.data.packing:
            check_packing(trainer.run)
        try:
            with display(shown=group.rank == 0, num_steps=config.steps, done=done, log_steps=config.log_steps) as shown:
                trainer.open_output(shown, {} if restart is None else restart.row)
                if recovery is not None and restart is not None:
                    for line in recovery.lines(restart):
                        shown.say(line)
                    if restart.unevaluated:
                        shown.say(f"step {done}  validation loss {trainer.evaluate(done):.4f}")
                    for line in trainer.saves.save(done) if restart.unsaved else ():
                        shown.say(line)
                for line in planner.notes if planner else []:
                    shown.say(line)
                if note:
                    shown.say(note)
                if choice is not None:
                    shown.say(f"under memory.cap: {chosen_words(config)}")
                if (found := _steps(trainer, shown, done + 1, planner, recovery)) is not None:
                    return found
                if group.preemption.saved is not None:
                    return None
            group.preemption.last_step_done()
            trainer.report(shown)
            if config.model.pretrained is not None:
                shown.say(f"model: {trainer.save_model()}")
            if config.sample_tokens:
                shown.say(f"sample:\n{trainer.sample()}")
        except InputError as error:  # options are valid: now it is a failure, such as a full disk
            raise RunError(str(error)) from error
        except Exception:
            if recovery is not None:
                recovery.keep(trainer.run, trainer.samples_seen)
            raise
        finally:
            if recovery is not None:
                recovery.ended(trainer.done)
    return None


def _steps_until(
    trainer: Trainer, shown: Display, last: int, planner: "RunPlanner | None", recovery: RunRecovery | None
) -> Path | None:
    """All steps up to `last`, or fewer after a signal; the checkpoint that a spike takes the run back to."""
    while trainer.done < last and not trainer.group.preemption.agreed:
        row: dict[str, Any] = {}
        for row in trainer.steps(trainer.done + 1, last, shown):
            shown.step(row)
            for line in (*row.get("warnings", ()), *trainer.saves.poll()):
                shown.say(line)
            if planner is not None and (line := planner.observe(row)) is not None:
                shown.say(line)
        if "spike" in row and trainer.config.on_spike == "rewind":
            for line in trainer.saves.finish():
                shown.say(line)
            if recovery is not None:
                recovery.forget()
            target, line = rewind(trainer.run, trainer.done, row["spike"])
            shown.say(line)
            if target is not None:
                return target
            if recovery is not None:
                recovery.remember(trainer.run, trainer.done)
    return None


def _steps(
    trainer: Trainer, shown: Display, first: int, planner: "RunPlanner | None", recovery: RunRecovery | None
) -> _Next | None:
    """All steps from `first`, with evaluations and checkpoints; as `_train_on`."""
    config = trainer.config
    if planner is not None:
        planner.begin(trainer.run)
    for last in range(first, config.steps + 1):
        evaluates, saves = (
            bool(every) and (last % every == 0 or last == config.steps)
            for every in (config.eval_steps, config.save_steps)
        )
        copies = recovery is not None and recovery.is_due(last)
        if not (evaluates or saves or copies or last == config.steps):
            continue
        target = _steps_until(trainer, shown, last, planner, recovery)
        preemption = trainer.group.preemption
        if target is not None:
            if not preemption.agreed:
                return _Next(config, target, trainer.run.samples)
            preemption.saved = target
            shown.say(f"step {trainer.done}  pre-empted. {_RESUME}")
            return None
        if preemption.agreed and trainer.done < config.steps:
            for line in trainer.saves.finish():
                shown.say(line)
            if evaluates and trainer.done == last and trainer.group.black_box.grows:  # the ranks that go on would not
                shown.say(f"step {last}  validation loss {trainer.evaluate(last):.4f}")
            preemption.saved = run_checkpoints.save(trainer.run, trainer.done)
            ends = "more ranks go on" if trainer.group.black_box.grows else f"pre-empted. {_RESUME}"
            shown.say(f"step {trainer.done}  saved {preemption.saved}; {ends}")
            return None
        if evaluates:
            shown.say(f"step {last}  validation loss {trainer.evaluate(last):.4f}")
        if saves:
            for line in trainer.saves.save(last):
                shown.say(line)
            for line in trainer.saves.finish(retry=last) if planner is not None and planner.plans_again else ():
                shown.say(line)
            other = planner.again() if planner is not None and last < config.steps else None
            if isinstance(other, str):
                shown.say(other)
            elif other is not None:
                return _Next(other, checkpoint_path(trainer.run.output_dir, last), None)
        if recovery is not None:
            recovery.copy_if_due(trainer.run, last)
        first = last + 1
    return None
