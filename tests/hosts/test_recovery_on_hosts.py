"""`--recover` under torchrun on several hosts: a rank is killed, and hosts are lost and replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cpu.train_runs import local, metrics_so_far, story, text, words  # noqa: F401
from tests.hosts.room import Room, room

pytestmark = [pytest.mark.whole_grid, pytest.mark.timeout(600)]
MOST_SECONDS = 240.0
OPTIONS = ("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=run")


class Agents:
    """torchrun's agents with a rank each; what the one on a host prints is in ``0.log``, ``1.log``, ..."""

    def __init__(self, hosts: Room, directory: Path, command: list[str]) -> None:
        self._hosts, self._directory, self._command = hosts, directory, command
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, host: int) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", *OPTIONS, "--rdzv-endpoint=host-0:29500"]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with open(self._directory / f"{host}.log", "ab") as log:
            line = [*torchrun, "-m", "pipeloom", *self._command]
            self.processes[host] = self._hosts.hosts[host].start(line, log, environment)

    def log(self, host: int) -> str:
        return (self._directory / f"{host}.log").read_text()


@contextmanager
def two_agents(hosts: Room, directory: Path, command: list[str]) -> Iterator[Agents]:
    found = Agents(hosts, directory, command)
    try:
        for host in range(2):
            found.start(host)
        yield found
    finally:
        for process in found.processes.values():
            process.kill()
            process.wait()


def until(done: Callable[[], bool], agents: Agents) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not done():
        assert time.monotonic() < deadline, "\n".join(map(agents.log, agents.processes))
        time.sleep(0.02)


def workers_of(hosts: Room, host: int) -> list[int]:
    """The processes of the ranks on a host."""
    namespace, found = os.readlink(f"/proc/{hosts.hosts[host].keeper}/ns/pid"), []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            command = (path / "cmdline").read_bytes()
            is_worker = b"-m\0pipeloom\0train" in command and b"torch.distributed.run" not in command
            if is_worker and os.readlink(path / "ns/pid") == namespace:
                found.append(int(path.name))
    return found


@pytest.mark.parametrize("lost", ["rank", "processes", "power"])
def test_all_ranks_go_back_to_copies_in_memory(lost: str, text: Path, tmp_path: Path) -> None:  # noqa: F811
    """A rank is killed; or all processes of a host, or its power goes, and an agent on this or another host joins."""
    out, reference = tmp_path / "out", tmp_path / "reference"
    options = ("--steps=20", "--save_steps=20", "--eval_steps=0", "--sample_tokens=0")
    command = words(text, out, *options, "--watchdog_seconds=3", "--recover", "--copy_steps=2")
    with room(3, tmp_path, own_loopback=True) as hosts, two_agents(hosts, tmp_path, command) as agents:
        hosts.delay(0.02)
        until(lambda: len(metrics_so_far(out)) >= 7, agents)
        if lost == "rank":
            (worker,) = workers_of(hosts, 1)
            os.kill(worker, signal.SIGKILL)
        elif lost == "processes":
            agents.processes[1].kill()
            agents.processes[1].wait()
            ends = ["nsenter", f"--target={hosts.hosts[1].keeper}", "--pid", "kill", "-KILL", "--", "-1"]
            subprocess.run(ends, check=True)
            agents.start(1)
        else:
            hosts.end(1)
            agents.processes.pop(1).wait()
            agents.start(2)
        until(lambda: all(process.poll() is not None for process in agents.processes.values()), agents)
        assert [process.returncode for process in agents.processes.values()] == [0, 0], agents.log(0)
        told = agents.log(0)
    assert re.search(
        r"\nstep \d+  recovered: torchrun started all ranks again; all ranks went back to the copies in memory of step "
        r"\d+; [1-3] steps? again, [\d.]+ s\n",
        told,
    ), told
    if lost == "power":
        assert "on host-1, does not answer: its host, its link or its process is stopped; rank 0 waits for it" in told
    else:
        assert "rank 1 ended while rank 0 waited for it" in told or "Connection closed by peer [10.77.0.2]" in told
    local(text, reference, *options)
    assert story(out) == story(reference)
