"""Runs over two hosts of namespaces, with a network that delays, and that is cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.cpu.train_runs import Fork, local, printed, started, story, text, wait_for_steps, words  # noqa: F401
from tests.hosts.room import Room, room

PORT = "29500"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Room]:
    with room(2, tmp_path) as found:
        yield found


def be_rank(hosts: Room, rank: int) -> None:
    """Let this process be a rank on a host of its own; the first knows itself by a loopback address, as on Debian."""
    hosts.hosts[rank].enter()
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    meeting = {"MASTER_ADDR": hosts.hosts[0].address if rank else "127.0.1.1", "MASTER_PORT": PORT}
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **meeting}


@contextmanager
def running(hosts: Room, words: list[str]) -> Iterator[list[Fork]]:
    """One rank on each host."""
    with ExitStack() as stack:
        yield [stack.enter_context(started(words, first=partial(be_rank, hosts, rank))) for rank in range(2)]


def test_a_run_over_two_hosts_is_cut_told_and_resumed_bitwise(
    hosts: Room,
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    out, reference = tmp_path / "out", tmp_path / "reference"
    command = words(text, out, "--sample_tokens=0", "--watchdog_seconds=2", "--resume_from_checkpoint=auto")
    hosts.delay(0.02)
    with running(hosts, command) as ranks:
        wait_for_steps(ranks[0], out, 4)
        hosts.cut()
        codes = [rank.wait() for rank in ranks]
        told = [printed(rank.stderr) for rank in ranks]
    assert codes == [1, 1], told
    assert "on host-1, does not answer: its host, its link or its process is stopped; rank 0 waits for it." in told[0]
    (error,) = [line for line in told[1].splitlines() if "error:" in line]
    assert error.startswith("pipeloom: error: rank 1 waits for rank 0 in step "), told
    assert f"and host-1 gets no answer from {hosts.hosts[0].address}, port {PORT}, where the ranks met" in error
    assert "stack" not in told[1]  # of a rank that waits
    hosts.cut(False)
    hosts.delay(0.0)
    with running(hosts, command) as ranks:
        assert [rank.wait() for rank in ranks] == [0, 0], [printed(rank.stderr) for rank in ranks]
        assert ", from " + str(out / "checkpoint-3") in printed(ranks[0].stdout)
    local(text, reference, "--sample_tokens=0")
    assert story(out) == story(reference)
