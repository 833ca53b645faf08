"""Ranks that hang: stopped, in Python, in a lock, in the data. Every rank says where it is, and one line names one."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.processes import watchdog as watchdog_module
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.launching import torchrun
from pipeloom.processes.watchdog import Watchdog
from pipeloom.train.output.directory import Journal
from pipeloom.train.trainer import Trainer

from .train_runs import Fork, local, printed, text, words

__all__ = ["text"]  # a fixture

SECONDS = 2.0
OPTIONS = (f"--watchdog_seconds={SECONDS}", "--eval_steps=0", "--save_steps=0", "--steps=2000", "--sample_tokens=0")
LIBC = ctypes.PyDLL(None)  # its calls keep the interpreter lock


def _spin() -> None:
    while True:
        pass


HANGS: dict[str, Callable[[], object]] = {
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "interpreter lock": lambda: LIBC.sleep(1000),
}


def _hang_in_forward(kind: str, victim: str) -> None:
    """The process whose rank is `victim` hangs in a forward of its sixth step."""
    calls = 0

    def before(module: nn.Module, arguments: Any) -> None:
        nonlocal calls
        if type(module).__name__ == "StageModule" and os.environ.get("RANK") == victim and module.training:
            calls += 1
            if calls == 22:  # four in a step
                HANGS[kind]()

    nn.modules.module.register_module_forward_pre_hook(before)


def _hang_in_data(victim: str) -> None:
    batch, calls = Trainer._batch, 0

    def slow(self: Trainer, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 6 and os.environ.get("RANK") == victim:
            time.sleep(1000)
        return batch(self, *arguments)

    Trainer._batch = slow  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "kind", ["stop", pytest.param("spin", marks=pytest.mark.whole_grid), "interpreter lock", "data"]
)
def test_a_rank_that_hangs_is_named_by_all(text: Path, tmp_path: Path, kind: str) -> None:
    """No process is left, also none that is stopped: the fixture of all tests looks for them."""

    def first() -> None:
        _hang_in_data("0") if kind == "data" else _hang_in_forward(kind, "0")

    command = words(text, tmp_path / "out", *OPTIONS)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = Fork([sys.executable, "-m", "pipeloom", *command], stdout=out, stderr=errors, first=first)
        code, lines = process.wait(), printed(errors).splitlines()
    last = lines[-1]
    assert code == 1, lines
    assert last.startswith("pipeloom: error: rank 0"), lines
    assert "; rank 1 waits for it." in last
    assert "If it only needs longer, raise the watchdog's limit of 2 s" in last
    assert len([line for line in lines if line.startswith("pipeloom: error")]) == 1
    told = [line for line in lines if line.startswith("pipeloom: rank 1 in step 6, action 1RECV_F")]
    assert len(told) == 1, lines
    assert "(stage 1, micro-batch " in told[0]
    assert "waits for rank 0" in told[0]
    if kind == "stop":
        assert "is stopped by SIGSTOP or a debugger" in last
    elif kind == "interpreter lock":
        assert "does not answer: a C call holds Python's interpreter lock" in last
        assert any("test_watchdog.py" in line for line in lines)  # its stack, by a thread that needs no lock
    else:
        assert " hangs in step 6" in last
        assert "test_watchdog.py:" in last
        assert lines.count("pipeloom: rank 0: Python stack") == 1


def _forks(function: Callable[[int], None], directory: Path, size: int = 2) -> tuple[list[int], str]:
    """``function(rank)`` in forks; their exit codes, and what they print on standard error."""
    errors, children = directory / "errors", []
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo, which takes seconds
    for rank in range(size):
        if not (child := os.fork()):
            code = 99
            try:
                os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
                function(rank)
                code = 0
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return codes, errors.read_text()


def _under_torchrun(first: Callable[[], None], command: list[str], directory: Path) -> tuple[list[int], str]:
    """A run of two ranks, as torchrun starts them; exit codes, and what they print on standard error."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> None:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_PORT": store.port}
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: f"{value}" for name, value in {**place, **agent, "GLOO_SOCKET_IFNAME": "lo"}.items()}
        first()
        with open(os.devnull, "w") as nothing:
            sys.stdout = nothing
            if main(command):
                raise SystemExit(1)

    return _forks(rank, directory)


def test_a_stopped_rank_of_torchrun_is_named_and_killed(text: Path, tmp_path: Path) -> None:
    def first() -> None:
        _hang_in_forward("stop", "1")

    codes, printed_lines = _under_torchrun(first, words(text, tmp_path / "out", *OPTIONS), tmp_path)
    assert codes == [1, -signal.SIGKILL], printed_lines
    lines = printed_lines.splitlines()
    assert len(lines) == 2, printed_lines
    assert lines[0].startswith("pipeloom: rank 0 in step 6, action 0RECV_B"), lines
    assert lines[1].startswith("pipeloom: error: rank 1, process "), lines
    assert "is stopped by SIGSTOP or a debugger; rank 0 waits for it" in lines[1]


def _stop_in_saves(victim: str, errors: Path, warning: str) -> None:
    """The process whose rank is `victim` stops in each save, until as many lines as saves have the warning."""
    enter, saves = Journal.enter, 0

    def stop(self: Journal, phase: str, **more: Any) -> None:
        nonlocal saves
        enter(self, phase, **more)
        if not phase.startswith("checkpoint after") or os.environ.get("RANK") != victim:
            return
        saves += 1
        process = os.getpid()
        if not os.fork():
            while errors.read_text().count(warning) < saves:
                time.sleep(0.01)
            os.kill(process, signal.SIGCONT)
            os._exit(0)
        os.kill(process, signal.SIGSTOP)
        os.wait()

    Journal.enter = stop  # type: ignore[method-assign]


def test_a_rank_of_torchrun_that_is_stopped_in_a_save_is_named_and_may_go_on(text: Path, tmp_path: Path) -> None:
    warning = "is stopped by SIGSTOP or a debugger; the run waits for it, and ends after 300 s without progress"

    def first() -> None:
        _stop_in_saves("1", tmp_path / "errors", warning)

    options = ("--watchdog_seconds=1", "--eval_steps=0", "--save_steps=2", "--steps=4", "--sample_tokens=0")
    codes, printed_lines = _under_torchrun(first, words(text, tmp_path / "out", *options), tmp_path)
    assert codes == [0, 0], printed_lines
    lines = printed_lines.splitlines()
    assert len(lines) == 2, printed_lines
    for line in lines:
        assert line.startswith("pipeloom: warning: rank 1 (process "), line
        assert warning in line


def _train(rank: int, directory: Path, between: Callable[[int], None]) -> None:
    """Six steps of a pipeline of the library with a watchdog; `between` is called before each."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    with Watchdog(SECONDS) as watchdog:
        pipe = pl.Pipeline(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), schedule,
            loss_fn=nn.functional.mse_loss, blackbox=watchdog.blackbox,
        )  # fmt: skip
        for _ in range(6):
            if rank == 1:
                between(rank)
            pipe.step(torch.ones(4, 4), torch.ones(4, 4))
        with watchdog.paused():
            dist.barrier()
        pipe.close()


def test_the_library_names_a_rank_that_does_not_step(tmp_path: Path) -> None:
    calls = iter(range(6))

    def sleep(rank: int) -> None:
        time.sleep(1000 if next(calls) == 3 else 0)

    codes, lines = _forks(lambda rank: _train(rank, tmp_path, sleep), tmp_path)
    assert codes[0] == 1, lines
    assert codes[1] in (1, -signal.SIGKILL), lines  # it ends by itself, or is ended
    assert "pipeloom: error: rank 1 hangs in action " in lines
    assert "test_watchdog.py" in lines
    assert "pipeloom: rank 0 in action " in lines


def test_a_rank_that_only_works_longer_is_left_alone(tmp_path: Path) -> None:
    """Rank 0 waits for longer than its limit, while rank 1 makes progress, or is paused."""

    def work(rank: int) -> None:
        watchdog = next(each for each in gc.get_objects() if isinstance(each, Watchdog))
        if next(calls) == 2:
            with watchdog.paused():
                time.sleep(1.2 * SECONDS)
        if next(calls) == 3:
            for _ in range(6):
                time.sleep(SECONDS / 5)
                watchdog.black_box.clock = time.perf_counter()

    calls = iter([0, 0, 2, 0, 0, 3, 0, 0, 0, 0, 0, 0])
    codes, lines = _forks(lambda rank: _train(rank, tmp_path, work), tmp_path)
    assert (codes, lines) == ([0, 0], "")


def test_a_rank_whose_parent_has_ended_ends(tmp_path: Path) -> None:
    note = tmp_path / "process"
    reader, writer = os.pipe()
    if not (agent := os.fork()):
        try:
            os.dup2(writer, 2)
            os.close(writer)
            if os.fork():
                time.sleep(1000)
            with Watchdog(0.5):
                note.write_text(str(os.getpid()))
                time.sleep(1000)
        finally:
            os._exit(0)
    os.close(writer)
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    with open(reader) as errors:  # the pipe is closed when the rank has ended
        assert errors.read() == "pipeloom: rank 0: its parent process has ended, and this process ends too\n"


def test_a_rank_whose_parent_had_ended_before_it_watched_ends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(torchrun.RUN, "x")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(torchrun, "_starts", lambda _: False)
    process = os.fork()
    if not process:
        with Watchdog(0.5):
            time.sleep(10)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert capfd.readouterr().err == "pipeloom: rank 0: its parent process has ended, and this process ends too\n"


def test_the_limit_of_a_phase_holds_as_it_begins() -> None:
    """The launcher reads it in the black box, also of a rank that is stopped before the watchdog looks again."""
    with Watchdog(100.0, always=True) as watchdog:
        box = watchdog.black_box
        box.enter("setup", patient=True)
        patient = box.limit_seconds
        box.count_step()
        box.count_step()
        box.enter("step 3", patient=False)
        assert box.limit_seconds == 100.0
        box.enter("checkpoint after step 3", patient=True)
        assert box.limit_seconds == patient == 1000.0


def test_a_process_forked_after_a_run_watches_its_own_run(tmp_path: Path) -> None:
    """A timer of faulthandler that is still there at the fork would hold up the child for ever."""

    def run(rank: int = 0) -> None:
        with Watchdog(100.0, always=True) as watchdog:
            for _ in range(3):  # the third step has a shorter limit
                watchdog.black_box.count_step()

    run()
    codes, lines = _forks(run, tmp_path, 1)
    assert (codes, lines) == ([0], "")


def test_an_evaluation_without_progress_is_told_of(text: Path, tmp_path: Path) -> None:
    """The limit is 300 s: before, nobody said a word until then."""
    slept = False

    def before(module: nn.Module, arguments: Any) -> None:
        nonlocal slept
        if os.environ.get("RANK") == "1" and type(module).__name__ == "StageModule" and not module.training:
            time.sleep(0.0 if slept else 1.2)
            slept = True

    def first() -> None:
        watchdog_module._NOTICE_SECONDS, watchdog_module._NOTICE_GAP_SECONDS = 0.4, 0.1
        nn.modules.module.register_module_forward_pre_hook(before)

    options = ("--watchdog_seconds=1", "--steps=3", "--save_steps=0", "--sample_tokens=0")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "-m", "pipeloom", *words(text, tmp_path / "out", *options)]
        code = Fork(command, stdout=out, stderr=errors, first=first).wait()
        lines = [line for line in printed(errors).splitlines() if "in evaluation" in line]
    assert code == 0, lines
    begin = "pipeloom: no progress: rank 1 in evaluation after step 3, action 1F0 (stage 1, "
    parts = (
        "test_watchdog.py",
        "; rank 0 in evaluation after step 3, action 0",
        ", waits for rank 1. The watchdog ends the run after ",
    )
    # The first may come before rank 0 stands still for long enough, the last when rank 1 goes on.
    assert any(line.startswith(begin) and all(part in line for part in parts) for line in lines), lines


def _save(rank: int, directory: Path, work: Callable[[BlackBox], None]) -> None:
    """A phase that may take long: rank 0 waits for rank 1, which is at `work`."""
    watchdog_module._NOTICE_SECONDS = 0.8
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    with Watchdog(0.5, always=True) as watchdog:
        dist.barrier()
        watchdog.black_box.enter("checkpoint after step 2", patient=True)
        if rank == 1:
            work(watchdog.black_box)
        dist.barrier()


def test_one_rank_says_where_ranks_without_progress_are(tmp_path: Path) -> None:
    codes, lines = _forks(lambda rank: _save(rank, tmp_path, lambda box: time.sleep(1.8)), tmp_path)
    assert codes == [0, 0], lines
    assert lines.count("\n") == 1, lines
    assert lines.startswith("pipeloom: no progress: rank 1 in checkpoint after step 2 for "), lines
    assert "; rank 0 in checkpoint after step 2 for " in lines


def test_progress_inside_a_phase_keeps_it_silent(tmp_path: Path) -> None:
    def work(box: BlackBox) -> None:
        for _ in range(18):
            time.sleep(0.1)
            box.progressed("checkpoint")

    codes, lines = _forks(lambda rank: _save(rank, tmp_path, work), tmp_path)
    assert (codes, lines) == ([0, 0], "")


@pytest.mark.parametrize("background", ["true", "false"])
def test_each_tensor_of_a_save_and_of_a_load_is_progress(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: str
) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(BlackBox, "progressed", lambda box, phase: seen.append((box.phase, phase)))
    options = ("--save_steps=1", "--eval_steps=0", "--sample_tokens=0", f"--background_saves={background}")
    local(text, tmp_path / "out", "--steps=1", *options)
    saved = len(seen)
    assert saved > 50  # of a model of 4 layers, with two states per parameter
    assert {phase for _, phase in seen} == {"checkpoint"}
    local(text, tmp_path / "out", "--steps=1", *options, "--resume_from_checkpoint=latest")
    assert len(seen) > saved + 50 // 2
    assert all(entered.startswith("loading ") and phase == "loading" for entered, phase in seen[saved:])


def test_a_save_in_the_background_is_no_progress_of_a_step() -> None:
    box = BlackBox()
    box.enter("step 3", patient=False)
    before = box.clock
    box.progressed("checkpoint")
    assert box.clock == before
    box.enter("checkpoint after step 3", patient=True)
    before = box.clock
    box.progressed("checkpoint")
    assert box.clock > before


def test_the_limit_of_an_evaluation_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    with Watchdog(None, always=True) as watchdog:
        box = watchdog.black_box

        def evaluated(seconds: float) -> float:
            """The limit of an evaluation that takes so long."""
            box.enter("evaluation after step 3", patient=True)
            limit = box.limit_seconds
            time.sleep(seconds)
            box.enter("step 4", patient=False)
            return limit

        assert evaluated(0.0) == 1800.0
        for _ in range(2):
            box.count_step()
        assert evaluated(0.01) == 1800.0  # none was seen after the steps that compile
        assert evaluated(0.2) == 60.0
        monkeypatch.setattr(watchdog_module, "_TIMES_EVALUATION", 1000.0)
        assert 200.0 <= evaluated(0.0) <= 1800.0
        monkeypatch.setattr(watchdog_module, "_TIMES_EVALUATION", 1e6)
        assert evaluated(0.0) == 1800.0  # never longer than the first
        box.enter("checkpoint after step 4", patient=True)
        assert box.limit_seconds == 1800.0
        box.steps = 0.0  # another layout
        box.enter("step 5", patient=False)
        for _ in range(2):
            box.count_step()
        assert evaluated(0.0) == 1800.0
