"""Where a run goes on after the loss of a rank: copies, checkpoints, the state of replicas, the step that was cut."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeloom.chaos.comparison import compare
from pipeloom.cli import main
from pipeloom.common.process_place import stat_fields
from pipeloom.errors import PeerLost, RunError
from pipeloom.processes import launcher, rendezvous
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.launching.fork_server import FORKED_BY
from pipeloom.processes.recovery.keeper import Keeper
from pipeloom.processes.recovery.lifeline import Loss, Memories
from pipeloom.processes.recovery.notes import Notes
from pipeloom.train import checkpoint, run_checkpoints
from pipeloom.train.config import validate
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.source import Source, newest
from pipeloom.train.machine.compile_cache import without_empty_cache
from pipeloom.train.recovery.partner_copies import PartnerCopies, receivers_of
from pipeloom.train.recovery.run_recovery import RunRecovery
from pipeloom.train.recovery.state_copies import StateCopies
from pipeloom.train.recovery.step_agreement import StepAgreement
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
    own.keep(run, lambda step: step)  # the optimizer ran out of memory
    assert own.copies.steps == []
    own.agreement.finish(5, {})
    own.forget()
    own.keep(run, lambda step: step)  # a rank was lost before all went back
    assert own.copies.steps == own.agreement.random_steps == []
    own.agreement.begin(5, whole=True)
    own.keep(run, lambda step: step)
    assert (own.copies.steps, run.samples_seen) == ([5], 5)


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
    on_next = PartnerCopies(rank, 3, 1, own, held)
    torch.manual_seed(rank)
    state = Run()
    for step in (3, 6):
        state.step()
        own.write(step, state.contents())
        on_next.exchange(step)
    on_next.exchange(6)  # once more
    assert on_next.held_steps == [6]
    if rank == 1:
        own.drop_after(-1)
        held.drop_after(-1)
    rows: list[Any] = [None] * 3
    dist.all_gather_object(rows, (own.steps, {on_next.held_rank: on_next.held_steps}))
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
        meets(member, backend, 1.0)

    rendezvous.join = hangs


def test_a_rank_that_hangs_as_it_starts_ends_the_run(text: Path, tmp_path: Path) -> None:  # noqa: F811
    done = launched(words(text, tmp_path / "out", *OPTIONS), first=hangs_before_it_meets)
    assert done.returncode == 1
    *stack, line = done.stderr.splitlines()
    assert re.fullmatch(
        rf"pipeloom: error: rank 1 on {socket.gethostname()} did not start within 1 s, and its process \d+ has not "
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
