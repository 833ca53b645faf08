"""Campaigns of `pipeloom chaos`: runs with faults end bitwise as the reference run, and differences are reported."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from pipeloom.chaos import attempt
from pipeloom.chaos.campaign import Campaign, Result
from pipeloom.chaos.fault import KINDS, Fault
from pipeloom.cli import main
from tests.cpu.train_runs import Fork, text  # noqa: F401

JOB: dict[str, Any] = {
    "steps": 6, "save_steps": 2, "eval_steps": 3, "eval_batches": 1, "sample_tokens": 0,
    "model": {"layers": 4, "width": 16, "heads": 2, "sequence_length": 16, "dropout": 0.1},
    "batch": {"size": 4, "microbatches": 2}, "optimizer": {"warmup_steps": 2},
}  # fmt: skip


@pytest.fixture
def job(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """A configuration; runs of the campaign are forks of this process."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo: here, for all forks
    monkeypatch.setattr(attempt, "subprocess", SimpleNamespace(Popen=Fork, DEVNULL=subprocess.DEVNULL))
    return write(tmp_path, {**JOB, "data": {"path": str(text), "validation_fraction": 0.3}})


def write(tmp_path: Path, options: dict[str, Any]) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def campaign(job: Path, *words: str) -> tuple[int, dict[str, Any]]:
    out = job.parent / "out"
    code = main(["chaos", str(job), f"--out={out}", *words])
    assert (out / "chaos.md").read_text().startswith("# Fault campaign\n")
    return code, json.loads((out / "chaos.json").read_text())


def test_a_small_campaign(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = campaign(job, "--kills=1", "--kinds=flip", "--seed=1")
    shown = capsys.readouterr().out
    assert code == 0, shown
    (fault,) = found["faults"]
    assert fault["attempts"] == 2
    assert fault["recovered"].startswith("resumed from checkpoint-")
    assert " before the damaged one" in fault["recovered"]
    assert fault["noticed_by"] == "rank 0"
    assert "is damaged" in fault["notice"]
    (killed,) = (job.parent / "out" / "logs").glob("*-1-1.err")
    assert f"rank {fault['fault']['rank']} was killed by SIGKILL" in killed.read_text()
    assert not list((job.parent / "out").glob("fault-*"))  # what came out right is deleted
    assert "1 of 1 runs came out bitwise" in shown


def test_an_interrupted_campaign_shows_the_faults_before(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Iterator[Result]:
        fault = Fault(kind="kill", rank=1, at=7)
        yield Result(1, fault, "step 2, action 1B0", "launcher", 0.1, "killed", 0.3, "resumed", 4.0, 2, None, ())
        raise KeyboardInterrupt

    (job.parent / "out").mkdir()
    monkeypatch.setattr(Campaign, "run", interrupted)
    code, found = campaign(job, "--kills=2", "--kinds=kill")
    assert code == 130
    assert [fault["number"] for fault in found["faults"]] == [1]
    assert "0 of 1 runs came out bitwise" in capsys.readouterr().out


WIDER = {
    "two ranks": {},
    "four ranks": {"parallel": {"pipeline": 4}, "schedule": "zb-h1"},
    "background saves": {"background_saves": True},
    "zero3": {"parallel": {"data": 2, "data_strategy": "zero3"}},
}


@pytest.mark.whole_grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", WIDER)
def test_every_kind_of_fault(job: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(job.parent, {**yaml.safe_load(job.read_text()), **WIDER[layout], "steps": 45, "save_steps": 5})
    code, found = campaign(job, f"--kills={2 * len(KINDS)}", "--seed=7", "--watchdog_seconds=1")
    shown = capsys.readouterr().out
    assert code == 0, shown
    for fault in found["faults"]:
        assert fault["where"] is not None, shown
        if fault["fault"]["kind"] in ("stop", "loop", "lock"):
            assert f"rank {fault['fault']['rank']}" in fault["notice"] or fault["noticed_by"].startswith("rank"), shown
