"""Ranks that the launcher has forked from one process with all imports done."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom.common.process_place import children, stat_fields
from pipeloom.processes.launching.ranks import Rank, RankStarter, anonymous_file
from pipeloom.processes.recovery.recoveries import Tethers

# What a process of the run does: it notes its rank, and the rank and the generation of its lifeline, and waits.
BODY = """
import os, signal
from pipeloom.processes.launching.fork_server import FORKED_BY, SERVER, fork_for_ranks
from pipeloom.processes.launching.ranks import LAUNCHED, LIFELINE
if "FAILS" in os.environ:
    raise SystemExit(1)
if "HANGS" in os.environ:
    signal.pause()
if "DIES" in os.environ:  # as it forks: it waits for the first process, which has forked the second one
    os.waitpid = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
place = fork_for_ranks(int(os.environ[SERVER])) if SERVER in os.environ else os.environ
end, *lifeline, _ = place[LIFELINE].split(":")
meeting, box = place[LAUNCHED].split(":")[1:]
files = [os.readlink(f"/proc/self/fd/{each}").split(" ")[0] for each in (end, meeting, box)]
with open(os.environ["NOTE"], "a") as file:
    file.write(f"{os.getpid()} {os.getpgrp()} {os.getppid()} {place['RANK']} {lifeline} {files[0][:6]} {files[1:]}\\n")
signal.pause()
"""


def starter(tmp_path: Path, meeting: int, tethers: Tethers, **more: str) -> RankStarter:
    environment = {"NOTE": str(tmp_path / "note"), **more}
    return RankStarter(["rank 0", "rank 1"], ["-c", BODY], environment, meeting, tethers, None, forks=True)


@pytest.fixture
def tethers() -> Iterator[Tethers]:
    found = Tethers(2)
    yield found
    found.close()


def wait_until_prepared(starter: RankStarter) -> None:
    deadline = time.monotonic() + 60
    while starter.prepares:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def end(rank: Rank) -> int | None:
    os.kill(rank.process.pid, signal.SIGKILL)
    rank.process.wait()
    return rank.process.returncode


def noted(tmp_path: Path, count: int) -> list[str]:
    deadline = time.monotonic() + 60
    while not (tmp_path / "note").exists() or (tmp_path / "note").read_text().count("\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return (tmp_path / "note").read_text().splitlines()


def note(rank: Rank, number: int, generation: int) -> str:
    files = f"['/memfd:pipeloom-meeting', '/memfd:pipeloom-black-box-{number}']"
    pid = rank.process.pid
    return f"{pid} {pid} {os.getpid()} {number} ['{number}', '{generation}'] socket {files}"


def test_ranks_are_forked_children_of_the_launcher(tmp_path: Path, tethers: Tethers) -> None:
    with anonymous_file("meeting") as meeting:
        starts = starter(tmp_path, meeting, tethers)
        starts.prepare()
        wait_until_prepared(starts)
        before = set(children())
        first, second = starts.start(0, 0), starts.start(1, 0)
        assert set(children()) - before == {first.process.pid, second.process.pid}
        noted(tmp_path, 2)
        assert first.process.poll() is None
        assert end(second) == -signal.SIGKILL
        again = starts.start(1, 3)
        lines = noted(tmp_path, 3)
        starts.prepare()  # there is one already
        starts.end_server()
        assert set(children()) - before == {first.process.pid, again.process.pid}
        assert {end(first), end(again)} == {-signal.SIGKILL}
    assert sorted(lines) == sorted([note(first, 0, 0), note(second, 1, 0), note(again, 1, 3)])


@pytest.mark.parametrize("fault", ["killed", "fails", "stopped", "hangs"])
def test_without_the_server_ranks_are_started(
    fault: str, tmp_path: Path, tethers: Tethers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeloom.processes.launching.fork_server._FORK_SECONDS", 0.01)
    with anonymous_file("meeting") as meeting:
        before = set(children())
        starts = starter(tmp_path, meeting, tethers, **({fault.upper(): "1"} if fault in ("fails", "hangs") else {}))
        starts.prepare()
        if fault == "hangs":
            monkeypatch.setattr("pipeloom.processes.launching.ranks._SERVER_SECONDS", 0.01)
        wait_until_prepared(starts)
        monkeypatch.setattr("pipeloom.processes.launching.ranks._SERVER_SECONDS", 60.0)
        if fault in ("killed", "stopped"):
            (server,) = set(children()) - before
            os.kill(server, signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        starts._environment = {"NOTE": str(tmp_path / "note")}
        rank = starts.start(1, 3)
        assert noted(tmp_path, 1) == [note(rank, 1, 3)]
        assert set(children()) - before == {rank.process.pid}
        assert end(rank) == -signal.SIGKILL
        monkeypatch.setattr("pipeloom.processes.launching.fork_server._FORK_SECONDS", 60.0)
        starts.prepare()
        wait_until_prepared(starts)
        rank = starts.start(0, 4)
        assert noted(tmp_path, 2)[1] == note(rank, 0, 4)
        end(rank)
        starts.end_server()
        assert set(children()) == before


def test_a_process_whose_server_dies_as_it_forks_ends(tmp_path: Path, tethers: Tethers) -> None:
    with anonymous_file("meeting") as meeting:
        before = set(children())
        starts = starter(tmp_path, meeting, tethers, DIES="1")
        starts.prepare()
        wait_until_prepared(starts)
        rank = starts.start(1, 0)  # started without the server
        assert noted(tmp_path, 1) == [note(rank, 1, 0)]
        deadline = time.monotonic() + 60
        others = set(children()) - before - {rank.process.pid}
        while any((stat_fields(each) or "Z")[0] != "Z" for each in others):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        for each in others:
            os.waitpid(each, 0)
        end(rank)
