"""Where a run goes on after the loss of a rank: copies, checkpoints, the state of replicas, the step that was cut."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from pipeloom.chaos.comparison import compare
from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.common.process_place import stat_fields
from pipeloom.errors import InputError, PeerLost, RunError
from pipeloom.processes import launcher, rendezvous
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.launching.fork_server import FORKED_BY
from pipeloom.processes.preemption import Preemption
from pipeloom.processes.recovery.keeper import Keeper
from pipeloom.processes.recovery.lifeline import Loss, Memories
from pipeloom.processes.recovery.notes import Notes
from pipeloom.processes.waits import waited_for
from pipeloom.train import checkpoint, loop, run_checkpoints
from pipeloom.train.config import validate
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.entry import entry_of
from pipeloom.train.elastic.source import ENTRY, Source, newest
from pipeloom.train.machine.compile_cache import without_empty_cache
from pipeloom.train.recovery import partner_copies
from pipeloom.train.recovery.partner_copies import PartnerCopies, receivers_of
from pipeloom.train.recovery.run_recovery import Restart, RunRecovery
from pipeloom.train.recovery.state_copies import StateCopies, StateCopy
from pipeloom.train.recovery.step_agreement import StepAgreement
from pipeloom.training import optimizer_step
from tests.cpu.ranks import run_ranks
from tests.cpu.test_state_copies import Run
from tests.cpu.train_runs import Fork, launched, metrics, printed, started, text, words  # noqa: F401


@pytest.fixture
def memories() -> Iterator[list[Memories]]:
    found = [Memories((os.memfd_create("copy"), os.memfd_create("copy")), os.memfd_create("notes")) for _ in range(3)]
    yield found
    for each in found:
        for descriptor in (*each.copies, each.notes):
            os.close(descriptor)


class Alone:
    """The only process of a run."""

    rank, size, mesh = 0, 1, None

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]


def recovery(tmp_path: Path, memories: list[Memories], **options: Any) -> RunRecovery:
    config = TrainConfig.from_mapping({"output_dir": str(tmp_path), "recover": True, "save_steps": 5, **options})
    return RunRecovery(config, {0: memories[0]}, 0, ())


def saved(tmp_path: Path, *steps: int) -> None:
    for step in steps:
        checkpoint.save(tmp_path, step, **Run().contents())


@pytest.mark.parametrize(
    ("first", "copied", "on_disk", "begun", "step", "words", "unsaved"),
    [
        (0, (4, 6), (), 7, 6, "the copies in memory of step 6", True),  # the save of step 5 was in the background
        (0, (4, 6), (5,), 7, 6, "the copies in memory of step 6", False),
        (0, (3, 4), (5,), 7, 5, "{out}/checkpoint-5", False),  # a checkpoint that is newer than the copies
        (0, (4, 5), (5,), 7, 5, "the copies in memory of step 5", False),
        (0, (4, 5), (), 6, 5, "the copies in memory of step 5", True),  # the save of step 5 was cut short
        (5, (5,), (), 6, 5, "the copies in memory of step 5", False),  # a run that began there has not saved it
        (5, (9,), (), 10, 9, "the copies in memory of step 9", False),
        (0, (), (5, 10), 12, 10, "{out}/checkpoint-10", False),  # copy_steps=0
        (0, (), (), 3, 0, "the beginning", False),
    ],
)
def test_where_a_run_goes_on(
    first: int,
    copied: tuple[int, ...],
    on_disk: tuple[int, ...],
    begun: int,
    step: int,
    words: str,
    unsaved: bool,
    tmp_path: Path,
    memories: list[Memories],
) -> None:
    state, own, group = Run(), recovery(tmp_path, memories), Alone()
    saved(tmp_path, *on_disk)
    for each in copied:
        own.copies.write(each, state.contents())
    assert own.restart(group) is None  # type: ignore[arg-type]  # the run had not begun
    own.copies.begin(first)
    own.begun, own.loss = begun, Loss("rank 2 was killed", 0.0)
    found = own.restart(group)  # type: ignore[arg-type]
    assert found is not None
    assert (found.step, found.again, found.unsaved) == (step, begun - step, unsaved)
    assert found.words == words.format(out=tmp_path)
    assert isinstance(found.source, Path) == bool(on_disk and step in on_disk and step not in copied)
    (line,) = own.lines(found)
    assert f"step {step}  recovered: rank 2 was killed; all ranks went back to {found.words}; " in line


def test_a_second_loss_on_the_way_counts_the_steps_of_the_first(tmp_path: Path, memories: list[Memories]) -> None:
    state, own, group = Run(), recovery(tmp_path, memories), Alone()
    own.copies.write(6, state.contents())
    own.copies.begin(0)
    own.begun, own.loss = 9, Loss("rank 2 was killed", 0.0)
    own.start = own.restart(group)  # type: ignore[arg-type]
    own.ended(6)  # rank 1 was killed while this one loaded the copies
    own.start = own.restart(group)  # type: ignore[arg-type]
    assert own.start is not None
    assert (own.start.step, own.start.again) == (6, 3)
    own.begin(cast("Any", SimpleNamespace(samples=None, group=group)), 6)
    own.ended(7)  # rank 1 was killed in the step after that
    found = own.restart(group)  # type: ignore[arg-type]
    assert found is not None
    assert (found.step, found.again) == (6, 1)


@pytest.mark.parametrize(
    ("copied", "step", "words"),
    [
        ((3, 4), 5, "{out}/checkpoint-5"),  # an older checkpoint, newer than the copies
        ((3, 6), 6, "the copies in memory of step 6"),
        ((12,), 12, "the copies in memory of step 12"),  # nobody reads the checkpoints
    ],
)
def test_a_recovery_passes_over_damaged_checkpoints(
    copied: tuple[int, ...], step: int, words: str, tmp_path: Path, memories: list[Memories]
) -> None:
    state, own = Run(), recovery(tmp_path, memories)
    saved(tmp_path, 5, 10)
    damaged = next((tmp_path / "checkpoint-10").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    for each in copied:
        own.copies.write(each, state.contents())
    own.copies.begin(0)
    own.begun, own.loss = 13, Loss("rank 2 was killed", 0.0)
    found = own.restart(Alone())  # type: ignore[arg-type]
    assert found is not None
    assert (found.step, found.words) == (step, words.format(out=tmp_path))
    *notices, _ = own.lines(found)
    if step == 12:
        assert notices == []
    else:
        (notice,) = notices
        assert damaged.name in notice
        assert notice.endswith("It is passed over for checkpoint-5, and kept as checkpoint-10.damaged.")
    assert own.lines(found)[:-1] == []  # said once


def test_copies_remain_where_no_checkpoint_is_whole(tmp_path: Path, memories: list[Memories]) -> None:
    own = recovery(tmp_path, memories)
    saved(tmp_path, 10)
    damaged = next((tmp_path / "checkpoint-10").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    own.copies.write(4, Run().contents())
    own.copies.begin(0)
    own.begun, own.loss = 11, Loss("rank 2 was killed", 0.0)
    found = own.restart(Alone())  # type: ignore[arg-type]
    assert found is not None
    assert found.words == "the copies in memory of step 4"
    notice, _ = own.lines(found)
    assert damaged.name in notice
    assert notice.endswith("It is passed over.")


@pytest.mark.parametrize("whole", [True, False])
def test_other_ranks_pass_over_damaged_checkpoints(whole: bool, tmp_path: Path) -> None:
    config = TrainConfig.from_mapping({"output_dir": str(tmp_path), "elastic": True, "parallel": {"pipeline": 2}})
    saved(tmp_path, *([5] if whole else []), 10)
    damaged = next((tmp_path / "checkpoint-10").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    ranks = Generation(
        range(2), num_more=0, grow_seconds=None, grown=False, before=(), variables={}, first=1, lends=False,
        survives=bool, copied=lambda: None, reroute=lambda _: None,
    )  # fmt: skip
    before = Source(3, (), tmp_path / "checkpoint-3")
    found, (notice,) = newest(before, ranks, config, None)
    ranks.tethers.close()
    assert (found.step, found.checkpoint) == ((5, tmp_path / "checkpoint-5") if whole else (3, before.checkpoint))
    assert damaged.name in notice
    assert "It is passed over" in notice


def test_a_state_inside_an_update_or_before_a_rewind_is_not_kept(
    tmp_path: Path, memories: list[Memories], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"output_dir": str(tmp_path), "recover": True, "parallel": {"pipeline": 1, "data": 2}}
    own = RunRecovery(TrainConfig.from_mapping(row), dict(enumerate(memories)), 0, ())
    monkeypatch.setattr(run_checkpoints, "contents", lambda _: Run().contents())
    run: Any = SimpleNamespace(samples_seen=0)
    assert own.agreement is not None
    own.agreement.begin(4, whole=True)
    own.agreement.sum(torch.zeros(1, dtype=torch.float64), lambda values: values)
    own.keep(run, lambda step: step)  # a rank was lost while the step ran once more, since it was not finite
    assert own.copies.steps == [4]
    own.copies.drop_after(-1)
    own.agreement.begin_update()
    own.keep(run, lambda step: step)  # the optimizer ran out of memory
    assert own.copies.steps == []
    own.agreement.finish(5, {})
    own.forget()
    own.keep(run, lambda step: step)  # a rank was lost before all went back
    assert own.copies.steps == own.agreement.random_steps == []
    own.agreement.begin(5, whole=True)
    own.keep(run, lambda step: step)
    assert (own.copies.steps, run.samples_seen) == ([5], 5)
    own.copies.drop_after(-1)

    def fails(_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run_checkpoints, "contents", fails)
    own.keep(run, lambda step: step)  # the error that comes first is told
    assert own.copies.steps == []


def test_an_evaluation_that_was_lost_is_made_again(tmp_path: Path, memories: list[Memories]) -> None:
    own = recovery(tmp_path, memories, eval_steps=3)
    own.copies.begin(0)
    own.copies.write(6, Run().contents())
    rows = ['{"step": 3, "eval_loss": 1}\n', '{"step": 6, "loss": 1}\n', '{"step": 6, "eval_loss": 1}']
    for end, lost in (("", True), ("\n", False)):
        (tmp_path / "metrics.jsonl").write_text("".join(rows) + end)
        assert own.restart(Alone()).unevaluated == lost  # type: ignore[arg-type, union-attr]


def agreements(memories: list[Memories], cuts: list[int]) -> list[StepAgreement]:
    notes = [Notes(each.notes) for each in memories]
    found = [StepAgreement(notes, rank, partial(cuts.append, rank)) for rank in range(len(notes))]
    for each in found:
        each.begin(4, whole=True)
    return found


def lost(_: torch.Tensor) -> torch.Tensor:
    raise PeerLost("gone")


def test_who_lost_the_sum_before_an_update_takes_it_from_who_has_it(memories: list[Memories]) -> None:
    cuts: list[int] = []
    first, second, third = agreements(memories, cuts)
    own, found = torch.tensor([1.0, 2.0], dtype=torch.float64), list[torch.Tensor]()
    waits = threading.Thread(target=lambda: found.append(second.sum(own, lost)))
    waits.start()  # until the others have stopped, or have the sum
    torch.manual_seed(7)
    assert first.sum(own, lambda values: values * 3).tolist() == [3.0, 6.0]
    waits.join(60)
    assert [each.tolist() for each in found] == [[3.0, 6.0]]
    assert cuts == [1]
    state = first.random(5)
    assert state is not None
    assert first.random_steps == [4, 5]
    drawn = torch.rand(1)
    checkpoint.restore_random_state(state)
    assert torch.rand(1) == drawn
    for each in (first, second):
        each.finish(5, {"step": 5})
        each.stop()
    third.finish(5, {})
    with pytest.raises(PeerLost):  # the sum of an earlier step does not count
        third.sum(own, lost)


def test_where_nobody_has_the_sum_no_rank_updates(memories: list[Memories]) -> None:
    raised: list[int] = []

    def sums(rank: int, each: StepAgreement) -> None:
        try:
            each.sum(torch.zeros(1, dtype=torch.float64), lost)
        except PeerLost:
            raised.append(rank)

    first, *others = agreements(memories, [])
    threads = [threading.Thread(target=sums, args=place) for place in enumerate(others)]
    for thread in threads:
        thread.start()
    first.stop()
    for thread in threads:
        thread.join(60)
    assert sorted(raised) == [0, 1]


def loses_a_machine(rank: int) -> tuple[list[int], list[float], bool]:
    """Three machines of one rank; that of rank 1 is replaced by a new one."""
    own, held = (StateCopies([os.memfd_create("copy") for _ in range(2)]) for _ in range(2))
    before, after, waits = (rank - 1) % 3, (rank + 1) % 3, partner_copies._wait
    on_next, awaited = PartnerCopies(rank, 3, 1, own, {before: held}), list[Any]()
    partner_copies._wait = lambda *works: [awaited.append(waited_for(sys._getframe())), waits(*works)]  # type: ignore
    torch.manual_seed(rank)
    state = Run()
    for step in (3, 6):
        state.step()
        own.write(step, state.contents())
        on_next.exchange(step)
    on_next.exchange(6)  # once more
    assert on_next.held_steps == {before: [6]}
    assert {*awaited} == {tuple(sorted((before, after)))}  # for the watchdog
    if rank == 1:
        own.drop_after(-1)
        held.drop_after(-1)
    rows: list[Any] = [None] * 3
    dist.all_gather_object(rows, (own.steps, on_next.held_steps))
    on_next.give_back(6, receivers_of(6, [steps for steps, _ in rows], [each for _, each in rows]))
    found = Run()
    own.read(6).load_model(found.model.state_dict())
    own.read(6).load_optimizer(found.optimizer, found.names)
    weights = [each.tolist() for each in found.model.parameters()]
    return own.steps, weights, weights == [each.tolist() for each in state.model.parameters()]


def test_a_new_machine_gets_the_copies_that_the_next_one_holds() -> None:
    found = run_ranks(loses_a_machine, 3)
    assert [steps for steps, _, _ in found] == [[3, 6], [6], [3, 6]]
    assert len({str(weights) for _, weights, _ in found}) == 3
    assert all(same for _, _, same in found)


def takes_other_places(rank: int) -> tuple[list[int], bool, list[int]]:
    """Three machines of one rank: the first and the third have each other's neighbour's place, the second is new.

    The copies of rank 1 are where neither that rank is now nor the one that holds its copies.
    """
    kept_before = ({2, 1}, {0, 2}, set[int]())[rank]
    states = []
    for each in range(3):
        torch.manual_seed(each)
        states.append(Run())
    memories = {each: [os.memfd_create("copy") for _ in range(2)] for each in {rank, (rank - 1) % 3, *kept_before}}
    copies = {each: StateCopies(found) for each, found in memories.items()}
    for each in kept_before:
        copies[each].write(6, states[each].contents())
    own = copies.pop(rank)
    on_next = PartnerCopies(rank, 3, 1, own, copies)
    rows: list[Any] = [None] * 3
    dist.all_gather_object(rows, (own.steps, on_next.held_steps))
    on_next.give_back(6, receivers_of(6, [steps for steps, _ in rows], [each for _, each in rows]))
    on_next.exchange(6)
    on_next.release_others()
    found = Run()
    own.read(6).load_model(found.model.state_dict())
    pairs = zip(found.model.parameters(), states[rank].model.parameters(), strict=True)
    same = all(one.equal(other) for one, other in pairs)
    others = kept_before - {rank, (rank - 1) % 3}
    sizes = [os.fstat(memory).st_size for each in others for memory in memories[each]]
    return [*on_next.held_steps], same, sizes


def test_copies_of_the_ranks_that_a_machine_had_before_come_back_and_are_freed() -> None:
    found = run_ranks(takes_other_places, 3)
    assert [held for held, _, _ in found] == [[2], [0], [1]]
    assert all(same for _, same, _ in found)
    assert [len(sizes) for _, _, sizes in found] == [2, 2, 0]
    assert all(size <= 4096 for _, _, sizes in found for size in sizes)


class Both(Alone):
    """One of two processes of a run."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_gather(self, payload: bytes) -> list[bytes]:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, payload)
        return found

    def gather_json(self, value: Any) -> list[Any]:
        return [json.loads(each) for each in self.all_gather(json.dumps(value).encode())]


def comes_back(rank: int, out: str) -> tuple[int, bool]:
    """Two machines of one rank. A third one takes the place of the second, and the run goes back behind step 6 and
    trains it again with other samples. Then the second machine comes back, with its copy of the first time.
    """
    row = {"output_dir": out, "recover": True, "copy_steps": 3, "eval_steps": 0, "parallel": {"pipeline": 2}}
    config, state, group = TrainConfig.from_mapping(row), Run(), Both(rank)
    first, third = (
        {each: Memories((os.memfd_create("copy"), os.memfd_create("copy")), -1) for each in range(2)} for _ in range(2)
    )
    run: Any = SimpleNamespace(samples=None, group=group, journal=SimpleNamespace(enter=lambda _: None))
    run_checkpoints.contents = lambda _: state.contents()  # type: ignore[assignment]

    def joins(machine: dict[int, Memories]) -> RunRecovery:
        found = RunRecovery(config, machine, rank, (), 1)
        found.loss, found.start = Loss("a machine was lost", 0.0), found.restart(group)  # type: ignore[arg-type]
        return found

    begun = joins(first)
    begun.begin(run, 0)
    begun.copies.begin(0)
    state.step()
    begun.copy_if_due(run, 6)
    again = joins(third if rank else first)
    assert again.start is not None
    assert again.start.step == 6
    again.begin(run, 6)
    again.forget()  # before a rewind
    again.begin(run, 3)
    state.step()
    again.copy_if_due(run, 6)
    start = joins(first).start
    assert start is not None
    assert isinstance(start.source, StateCopy)
    restored = Run()
    start.source.load_model(restored.model.state_dict())
    pairs = zip(restored.model.parameters(), state.model.parameters(), strict=True)
    return start.step, all(one.equal(other) for one, other in pairs)


def test_a_machine_that_comes_back_forgets_steps_that_were_trained_again(tmp_path: Path) -> None:
    assert run_ranks(comes_back, 2, str(tmp_path)) == [(6, True)] * 2


def test_machines_with_different_numbers_of_processes_are_refused() -> None:
    """Each would wait for a message that another one sends elsewhere."""
    own, held = (StateCopies([os.memfd_create("copy") for _ in range(2)]) for _ in range(2))
    copies = PartnerCopies(0, 3, 2, own, {1: held})
    with pytest.raises(InputError, match="recover=true: machines have 1 and 2 processes, but copies go to a machine"):
        copies.number_recovery(lambda row: [row, row, [row[0], 1, row[2]]])


def test_a_process_reads_what_its_machine_has_kept_for_other_ranks() -> None:
    keeper: Any = SimpleNamespace(names=[f"rank-{rank}" for rank in range(6)])
    for rank, kept in ((2, {2, 0, 4, 5}), (3, {3, 1})):
        member: Any = SimpleNamespace(rank=rank, world_size=6, local_rank=rank % 2, local_size=2)
        assert loop._kept_ranks(keeper, member) == kept
    member = SimpleNamespace(rank=1, world_size=2, local_rank=1, local_size=2)
    assert loop._kept_ranks(keeper, member) == {0, 1}


def test_ranks_go_on_at_the_copies_of_others_only_where_all_have_them(tmp_path: Path, memories: list[Memories]) -> None:
    """A rank that starts again reads of them in its environment; those that have begun no longer have them."""
    own = recovery(tmp_path, memories)
    own.copies.begin(0)
    own.loss, own.entry = Loss("rank 1 was killed", 0.0), Restart(None, 4, 0, False, False, {}, "copies of others")
    alone = Alone()
    found = own.restart(alone)  # type: ignore[arg-type]
    assert (found and found.words) == "copies of others"
    alone.gather_json = lambda row: [row, row._replace(enters=False) if hasattr(row, "enters") else row]  # type: ignore
    alone.all_gather = lambda payload: [payload] * 2  # type: ignore[method-assign]
    found = own.restart(alone)  # type: ignore[arg-type]
    assert (found and found.words) == "the beginning"


def test_a_copy_is_made_again_where_the_state_comes_from_a_checkpoint(
    tmp_path: Path, memories: list[Memories], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, state = recovery(tmp_path, memories), Run()
    monkeypatch.setattr(run_checkpoints, "contents", lambda _: state.contents())
    run: Any = SimpleNamespace(samples=None, group=Alone(), journal=SimpleNamespace(enter=lambda _: None))
    own.copies.write(5, Run().contents())
    start = Restart(tmp_path / "checkpoint-5", 5, 0, False, False, {}, "")
    own.start = start
    assert own.begin(run, 5) == start._replace(source=None)
    assert own.start is None
    found = Run()
    own.copies.read(5).load_model(found.model.state_dict())
    pairs = zip(found.model.parameters(), state.model.parameters(), strict=True)
    assert all(one.equal(other) for one, other in pairs)


def trains(config: TrainConfig, recovery: RunRecovery) -> None:
    with Preemption() as preemption:
        loop._train(config, None, preemption, recovery)


def mapped(memories: Memories) -> int:
    """How often this process has mapped the copies."""
    gc.collect()
    wanted = {str(os.fstat(descriptor).st_ino) for descriptor in memories.copies}
    return sum(line.split()[4] in wanted for line in Path("/proc/self/maps").read_text().splitlines())


def test_copies_of_other_ranks_are_freed_once_a_run_has_begun(
    text: Path,  # noqa: F811
    tmp_path: Path,
    memories: list[Memories],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = ("--local", "--recover", "--save_steps=0", "--eval_steps=0", "--sample_tokens=0", "--copy_steps=1")
    config = parse(words(text, tmp_path / "out", *short)[1:])
    before = RunRecovery(config, {0: memories[0]}, 0, ())
    trains(replace(config, steps=1), before)
    del before
    kept, found = mapped(memories[0]), list[int]()
    copies = [os.dup(descriptor) for descriptor in memories[0].copies]
    told = {ENTRY: json.dumps({"copies": [copies], "step": 1, "again": 0, "words": "copies of others"})}
    own = RunRecovery(replace(config, copy_steps=0), {0: memories[1]}, 0, ())
    own.entry = entry_of(told)
    own.copies.begin(0)
    assert mapped(memories[0]) > kept
    monkeypatch.setattr(RunRecovery, "step_ends", lambda _: found.append(mapped(memories[0])))
    trains(replace(config, steps=2), own)
    assert found == [kept]
    assert own.entry is None


def test_a_step_that_runs_again_has_not_changed_the_state(
    text: Path,  # noqa: F811
    tmp_path: Path,
    memories: list[Memories],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second step is not finite at first; a rank that is lost while it runs again leaves the state as it was."""
    short = ("--local", "--recover", "--save_steps=0", "--eval_steps=0", "--sample_tokens=0", "--on_nonfinite=retry")
    config = parse(words(text, tmp_path / "out", *short, "--steps=2", "--copy_steps=0")[1:])
    own, norms, found = RunRecovery(config, {0: memories[0]}, 0, ()), optimizer_step.gradient_norms, list[bool]()
    agreement = own.agreement = StepAgreement([Notes(memories[0].notes)], 0, lambda: None)

    def torn(pipeline: Any) -> torch.Tensor:
        found.append(agreement.updating)
        made = norms(pipeline)
        made[0] *= math.nan if len(found) == 3 else 1.0
        return made

    monkeypatch.setattr(optimizer_step, "gradient_norms", torn)
    update = optimizer_step.update_parameters
    monkeypatch.setattr(optimizer_step, "update_parameters", lambda *_: [found.append(agreement.updating), update(*_)])
    trains(config, own)
    assert found == [False, True, False, False, True]


def end_before_their_update(directory: Path, *ranks: str) -> None:
    """Each of these ranks is killed once, in step 6, with the sum over processes."""
    take = StepAgreement.sum

    def taken(self: StepAgreement, *arguments: Any) -> torch.Tensor:
        found, rank = take(self, *arguments), os.environ["RANK"]
        if rank in ranks and self.complete == 5 and not (note := directory / f"killed-{rank}").exists():
            note.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    StepAgreement.sum = taken  # type: ignore[method-assign]


def with_noted_forks(directory: Path) -> None:
    """Rank 0 is killed; each process that the fork server makes notes which rank it takes, and of which server."""
    end_before_their_update(directory, "0")
    fork = launcher.fork_for_ranks

    def forks(line: int) -> dict[str, str] | None:
        place = fork(line)
        if place is not None:
            (directory / f"fork-{os.getpid()}").write_text(f"{place['RANK']} {place[FORKED_BY]}")
        return place

    launcher.fork_for_ranks = forks


OPTIONS = (
    "--parallel.pipeline=1", "--parallel.data=2", "--model.dropout=0.1", "--steps=8", "--batch.microbatches=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def reference(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    out = tmp_path_factory.mktemp("reference")
    assert launched(words(text, out, *OPTIONS)).returncode == 0
    return out


def test_a_lost_rank_has_the_state_of_its_replica(text: Path, reference: Path, tmp_path: Path) -> None:  # noqa: F811
    """Step 6, which the others complete, is evaluated and saved by the new process; rank 0 writes its metrics."""
    out = tmp_path / "out"
    command = words(text, out, *OPTIONS, "--recover", "--copy_steps=0", "--spare=0")
    with started(command, first=partial(with_noted_forks, tmp_path)) as process:
        assert process.wait() == 0, printed(process.stderr)
        shown = printed(process.stdout)
    assert re.search(
        r"\nstep 6  recovered: .*; all ranks went back to the end of step 6, rank 0 of replica 0 with the state of "
        r"rank 0 of replica 1; 0 steps again, [\d.]+ s\nstep 6  validation loss ",
        shown,
    ), shown
    forks = [path.read_text().split() for path in tmp_path.glob("fork-*")]
    assert sorted(rank for rank, _ in forks) == ["0", "0", "1"]
    (server,) = {server for _, server in forks}
    assert not Path(f"/proc/{server}").exists()
    assert set(metrics(out)[6]) == set(metrics(reference)[6])
    assert compare(out, reference).equal
    assert (out / "checkpoint-6").is_dir()


def hangs_before_it_meets() -> None:
    """Rank 1 never meets the others."""
    meets = rendezvous.join

    def hangs(member: launcher.Membership, backend: str, limit_seconds: float) -> None:
        while member.rank == 1:
            time.sleep(60)
        meets(member, backend, 3.0)

    rendezvous.join = hangs


def test_a_rank_that_hangs_as_it_starts_ends_the_run(text: Path, tmp_path: Path) -> None:  # noqa: F811
    done = launched(words(text, tmp_path / "out", *OPTIONS), first=hangs_before_it_meets)
    assert done.returncode == 1
    *stack, line = done.stderr.splitlines()
    assert re.fullmatch(
        rf"pipeloom: error: rank 1 on {socket.gethostname()} did not start within 3 s, and its process \d+ has not "
        r"come here. Its Python stack is above. Start the run again. All ranks were ended.",
        line,
    ), done.stderr
    assert any(re.search(r"test_recovery.py., line \d+ in hangs$", each) for each in stack), done.stderr


def test_a_keeper_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeloom.processes.recovery.keeper._START_SECONDS", 0.1)
    monkeypatch.setattr("pipeloom.processes.recovery.keeper._ANSWER_SECONDS", 0.01)
    agent, fields = os.getppid(), stat_fields(os.getppid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(f"\0pipeloom-keeper-{os.getuid()}-{agent}-{fields[19]}")
        silent.listen(64)
        with pytest.raises(RunError, match=r"did not answer within 0\.1 s\. Start the run again"):
            Keeper()


def agent(command: list[str], directory: Path) -> None:
    """What torchrun's agent does: start all ranks, and start all of them again after a failure."""
    for _ in range(2):
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost"}
        with socket.socket() as free:
            free.bind(("localhost", 0))
            place["MASTER_PORT"] = str(free.getsockname()[1])
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **place}
        kills = partial(end_before_their_update, directory, "0", "1")
        with (directory / "printed").open("ab") as file:
            ranks = []
            for rank in "01":
                own = {**environment, "RANK": rank, "LOCAL_RANK": rank}
                ranks.append(Fork(command, env=own, stdout=file, stderr=file, first=kills))
            if [rank.wait() for rank in ranks] == [0, 0]:
                return


def test_all_ranks_of_torchrun_go_back_to_copies(text: Path, reference: Path, tmp_path: Path) -> None:  # noqa: F811
    """Both ranks are killed; their memory is there for the next ones, and ends with torchrun's agent."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "pipeloom", *words(text, out, *OPTIONS, "--recover", "--copy_steps=2")]
    process = multiprocessing.get_context("fork").Process(target=agent, args=(command, tmp_path))
    process.start()
    process.join(300)
    shown = (tmp_path / "printed").read_text()
    assert re.search(
        r"\nstep 4  recovered: torchrun started all ranks again; all ranks went back to the copies in memory of step "
        r"4; 2 steps again, [\d.]+ s\n",
        shown,
    ), shown
    assert compare(out, reference).equal
    keeper = f"pipeloom-keeper-{os.getuid()}-{process.pid}-".encode()
    deadline = time.monotonic() + 60
    while any(keeper in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_empty_cache_that_a_killed_process_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    for count, stays in (("0", True), ("1", False)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with without_empty_cache():
            pass
        assert cache.exists() == stays


def test_an_empty_cache_that_validation_has_made_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validating a model of Hugging Face imports torch, which makes it."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    out.mkdir()

    def makes(config: TrainConfig, **_: Any) -> list[str]:
        cache.mkdir()
        return []

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(validate, "validate", makes)
    monkeypatch.setattr(launcher, "launch", lambda *_, **__: 7 if cache.exists() else 0)
    assert main(["train", f"--output_dir={out}"]) == 7
    assert not cache.exists()
