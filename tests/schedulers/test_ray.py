"""The program of `pipeloom launch ray` on a Ray cluster of two nodes on this machine.

Needs Ray: the extra `schedulers`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from pipeloom.cli import main
from tests.cpu.train_runs import local, metrics, metrics_so_far, story, text, words  # noqa: F401

pytestmark = [pytest.mark.timeout(1500), pytest.mark.whole_grid]
MOST_SECONDS = 600.0


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster with two nodes, which ends with the test."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    directory = tempfile.mkdtemp(dir="/tmp")  # paths of sockets are short
    monkeypatch.setenv("RAY_TMPDIR", directory)
    node = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 100 << 20}
    found = Cluster()
    try:
        found.add_node(**node, include_dashboard=False)
        found.add_node(**node)
        yield found.address
    finally:
        found.shutdown()
        shutil.rmtree(directory, ignore_errors=True)


def ranks(out: Path) -> list[psutil.Process]:
    """The processes of the ranks of a run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = process.cmdline()
            if command[1:4] == ["-m", "pipeloom", "train"] and f"--output_dir={out}" in command:
                found.append(process)
    return found


@pytest.mark.parametrize("workers", [2, 4])
def test_a_run_with_a_killed_worker_goes_on_bitwise(
    cluster: str,
    text: Path,  # noqa: F811
    tmp_path: Path,
    workers: int,
) -> None:
    out, reference, program, log = (tmp_path / name for name in ("out", "reference", "job.py", "job.log"))
    head = ["launch", "ray", "--nodes", "2", "--processes-per-node", str(workers // 2), "--restarts", "1"]
    options = (f"--parallel.pipeline={workers}", "--sample_tokens=0", "--steps=30")
    run = words(text, out, *options)
    assert main([*head, "--storage", str(tmp_path / "results"), "--out", str(program), "--", *run]) == 0
    with log.open("wb") as output:
        environment = {**os.environ, "RAY_ADDRESS": cluster}
        job = subprocess.Popen(
            [sys.executable, str(program)], cwd=tmp_path, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + MOST_SECONDS
        while not [row for row in metrics_so_far(out) if row["step"] >= 4]:
            assert job.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        started = ranks(out)
        assert len(started) == workers
        started[-1].parent().kill()  # Ray's worker
        job.wait(MOST_SECONDS)
    finally:
        job.kill()
        job.wait()
    printed = log.read_text()
    assert job.returncode == 0, printed
    assert f", from {out}/checkpoint-" in printed
    local(text, reference, *options)
    assert story(out) == story(reference)
    lines = printed.splitlines()
    (reported,) = [ast.literal_eval(line) for line in lines if line.startswith("{")]
    assert reported.items() <= metrics(out)[-1].items()
    (checkpoint,) = [line for line in lines if line.startswith("Checkpoint(")]
    assert f"path={tmp_path}/results/pipeloom/" in checkpoint
