"""Batch scripts of `pipeloom launch slurm`, and steps of `srun`, on SLURM with two nodes.

Needs root, munge and SLURM: ``apt-get install slurm-wlm munge``. The nodes are hosts of namespaces on this machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeloom.cli import main
from tests.cpu.train_runs import local, metrics_so_far, story, text, words  # noqa: F401
from tests.schedulers.slurm import MOST_SECONDS, Slurm, slurm

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_grid]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


def wait_for_steps(cluster: Slurm, number: str, out: Path, count: int) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while len([row for row in metrics_so_far(out) if "loss" in row]) < count:
        log = out.parent / f"pipeloom-{number}.log"
        assert time.monotonic() < deadline, f"{cluster.logs()}\n{log.read_text() if log.exists() else 'no log'}"
        time.sleep(0.1)


@pytest.mark.parametrize("ends", ["USR1", "urgent job", "time limit"])
def test_a_job_that_is_queued_again_goes_on_bitwise(
    cluster: Slurm,
    text: Path,  # noqa: F811
    tmp_path: Path,
    ends: str,
) -> None:
    out, reference, script = tmp_path / "out", tmp_path / "reference", tmp_path / "job.sbatch"
    limit, steps = (["--hours=0.05", "--notice-seconds=60"], 24) if ends == "time limit" else ([], 12)
    head = ["launch", "slurm", "--nodes", "2", "--processes-per-node", "1", *limit, "--out", str(script)]
    options = ("--parallel.pipeline=2", "--sample_tokens=0", f"--steps={steps}")
    assert main([*head, "--", *words(text, out, *options)]) == 0
    number = cluster.submit(script)
    cluster.hosts.delay(0.05)
    wait_for_steps(cluster, number, out, 4)
    cluster.hosts.delay(0.5)  # steps take longer than what ends them
    if ends == "USR1":
        cluster.call("scancel", "--batch", "--signal=USR1", number)
    elif ends == "urgent job":
        urgent = cluster.submit(_urgent(tmp_path), "--partition=urgent", "--nodes=2")
        assert cluster.wait(urgent, JobState="COMPLETED")["ExitCode"] == "0:0"
    cluster.wait(number, Restarts="1", JobState="PENDING")
    cluster.hosts.delay(0.0)
    cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")  # SLURM lets it wait for 2 minutes
    job = cluster.wait(number, JobState="COMPLETED")
    log = (tmp_path / f"pipeloom-{number}.log").read_text()
    assert (job["Restarts"], job["ExitCode"], job["NumNodes"]) == ("1", "0:0", "2"), log
    assert "; pre-empted. Resume with" in log
    assert f", from {out}/checkpoint-" in log
    local(text, reference, *options)
    assert story(out) == story(reference)


def _urgent(directory: Path) -> Path:
    script = directory / "urgent.sbatch"
    script.write_text("#!/bin/bash\ntrue\n")
    return script


def test_tasks_of_srun_are_ranks(cluster: Slurm, text: Path, tmp_path: Path) -> None:  # noqa: F811
    out, reference = tmp_path / "out", tmp_path / "reference"
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1"]
    run = words(text, out, "--parallel.pipeline=2", "--sample_tokens=0")
    cluster.call(*srun, sys.executable, "-m", "pipeloom", *run)
    local(text, reference, "--parallel.pipeline=2", "--sample_tokens=0")
    assert story(out) == story(reference)
