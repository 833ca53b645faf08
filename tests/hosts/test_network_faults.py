"""torchrun on two hosts: a network that delays, that is cut for a while or for ever, and hosts that are gone."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cpu.train_runs import local, metrics_so_far, story, text, words  # noqa: F401
from tests.hosts.room import Room, room

pytestmark = [pytest.mark.whole_grid, pytest.mark.timeout(600)]
MOST_SECONDS = 240.0


@contextmanager
def torchruns(hosts: Room, directory: Path, command: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One torchrun with one rank on each host; what they print is in ``0.log`` and ``1.log``."""
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run"]
    line = [sys.executable, "-m", "torch.distributed.run", *options, "--rdzv-endpoint=host-0:29500", "-m", "pipeloom"]
    found = []
    for number, host in enumerate(hosts.hosts):
        with open(directory / f"{number}.log", "wb") as log:
            found.append(host.start([*line, *command], log))
    yield found
    for process in found:
        process.kill()
        process.wait()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_steps(out: Path) -> int:
    return len([row for row in metrics_so_far(out) if "loss" in row])


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Room]:
    with room(2, tmp_path, own_loopback=True) as found:
        yield found


@pytest.mark.parametrize(("cut_seconds", "watchdog_seconds"), [(0, 20), (1, 20), (10, 20), (25, 3)])
def test_a_network_that_delays_or_comes_back(
    hosts: Room,
    text: Path,  # noqa: F811
    tmp_path: Path,
    cut_seconds: int,
    watchdog_seconds: int,
) -> None:
    """After a cut that is longer than the watchdog's limit, torchrun starts the ranks again."""
    out, reference = tmp_path / "out", tmp_path / "reference"
    hosts.delay(0.05)
    command = words(text, out, f"--watchdog_seconds={watchdog_seconds}", "--resume_from_checkpoint=auto")
    with torchruns(hosts, tmp_path, command) as runs:
        if cut_seconds:
            until(lambda: num_steps(out) >= 4)
            hosts.cut()
            time.sleep(cut_seconds)  # it is about the network's time
            hosts.cut(False)
        until(lambda: all(run.poll() is not None for run in runs))
        assert [run.returncode for run in runs] == [0, 0], (tmp_path / "0.log").read_text()
    told = [(tmp_path / f"{number}.log").read_text() for number in range(2)]
    assert all(("pipeloom: error: rank" in each) == (cut_seconds > watchdog_seconds) for each in told), told
    local(text, reference)
    assert story(out) == story(reference)


@pytest.mark.parametrize("gone", ["power", "processes"])
def test_a_host_that_is_gone_is_named_and_the_run_goes_on_without_it(
    hosts: Room,
    text: Path,  # noqa: F811
    tmp_path: Path,
    gone: str,
) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    command = words(text, out, "--watchdog_seconds=3", "--resume_from_checkpoint=auto")
    hosts.delay(0.02)
    with torchruns(hosts, tmp_path, command) as runs:
        until(lambda: num_steps(out) >= 4)
        if gone == "power":
            hosts.end(1)
        else:
            runs[1].kill()
            subprocess.run(
                ["nsenter", f"--target={hosts.hosts[1].keeper}", "--pid", "kill", "-KILL", "--", "-1"], check=True
            )
        until(lambda: "pipeloom: error: " in (tmp_path / "0.log").read_text())
    line = next(each for each in (tmp_path / "0.log").read_text().splitlines() if "pipeloom: error: " in each)
    if gone == "power":
        assert "on host-1, does not answer: its host, its link or its process is stopped; rank 0 waits for it" in line
    else:
        assert "rank 1 ended" in line or f"[{hosts.hosts[1].address}]" in line  # a message, or what all ranks exchange
    local(text, out, "--resume_from_checkpoint=auto")
    local(text, reference)
    assert story(out) == story(reference)
