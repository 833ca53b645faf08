"""`pipeloom train` with copies goes on after a kill to the last bit, and in any other layout nearly so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeloom.cli import checkpoint as cli
from pipeloom.train import checkpoint as ck

from .test_train import local, metrics, metrics_so_far, ranks_of, run, story, text, wait_for_steps, words

__all__ = ["text"]  # a fixture

COPIES = (
    *("--parallel.pipeline=2", "--parallel.data=2", "--parallel.data_strategy=zero3", "--precision.dtype=fp16"),
    *("--model.dropout=0.1", "--batch.size=8", "--batch.microbatches=2", "--precision.loss_scale_steps=2"),
    *("--steps=12", "--save_steps=3", "--eval_steps=3", "--sample_tokens=0"),
)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("runs") / "whole"
    done = run(text, output_dir, *COPIES)
    assert done.returncode == 0, done.stderr
    return output_dir


def test_a_killed_run_of_copies_goes_on_to_the_last_bit(text: Path, whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "pipeloom", *words(text, killed, *COPIES)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for_steps(process, killed, 4)
    os.kill(ranks_of(process)[2], signal.SIGKILL)
    process.communicate(timeout=30)
    assert len([row for row in metrics_so_far(killed) if "loss" in row]) < 12, "the run was over before it was killed"
    found = ck.latest(killed)
    assert found is not None
    ck.verify(found)
    resumed = run(text, killed, *COPIES, "--resume_from_checkpoint=latest")
    assert resumed.returncode == 0, resumed.stderr
    assert story(killed) == story(whole)
    ends = [ck.load(directory / "checkpoint-12") for directory in (killed, whole)]
    assert ends[0].state["loss_scaler"] == ends[1].state["loss_scaler"]
    assert ends[0].manifest.files == ends[1].manifest.files, "every byte of model, optimizer and random states"


def test_one_process_in_float32_goes_on_where_four_in_float16_were(
    text: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that changes nothing, then an evaluation: it is that of the four."""
    saved = ck.load(whole / "checkpoint-9")
    assert saved.compute_type == "fp16"
    still = ("--optimizer.learning_rate=0", "--batch.size=8", "--steps=10", "--save_steps=10", "--eval_steps=10")
    more = ("--parallel.pipeline=1", "--sample_tokens=0", f"--resume_from_checkpoint={saved.path}")
    local(text, tmp_path, *still, *more)
    (evaluated,) = [row["eval_loss"] for row in metrics(tmp_path) if "eval_loss" in row]
    (expected,) = [row["eval_loss"] for row in metrics(whole) if row["step"] == 9 and "eval_loss" in row]
    assert evaluated == pytest.approx(expected, rel=1e-3)
    again = ck.load(tmp_path)
    for name in again.weight_map:
        assert torch.equal(saved.tensor(name), again.tensor(name)), name
    capsys.readouterr()
    assert cli.main(["verify", str(whole)]) == 0
    assert cli.main(["ls", str(whole)]) == 0
    assert "copies 2" in capsys.readouterr().out
