"""`pipeloom train` with copies goes on after a kill to the last bit, and in any other layout nearly so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from pipeloom.cli import checkpoint as cli
from pipeloom.train import checkpoint as ck

from .train_runs import local, metrics, metrics_so_far, printed, ranks_of, started, story, text, wait_for_steps, words

__all__ = ["text"]  # a fixture

COPIES = (
    *("--parallel.pipeline=2", "--parallel.data=2", "--parallel.data_strategy=zero3", "--precision.dtype=fp16"),
    *("--model.dropout=0.1", "--batch.size=8", "--batch.microbatches=2", "--precision.loss_scale_steps=2"),
    *("--steps=12", "--save_steps=4", "--eval_steps=4", "--sample_tokens=0"),
)


def forked(text: Path, output_dir: Path, *more: str, kill_after: int | None = None) -> str:
    """What a run of processes prints; rank 2 may be killed after some steps.

    However late that is, the run is not over then: it does not get beyond its second checkpoint before.
    """
    with started(words(text, output_dir, *more), None if kill_after is None else 8) as process:
        if kill_after is not None:
            wait_for_steps(process, output_dir, kill_after)
            os.kill(ranks_of(process)[2], signal.SIGKILL)
        assert process.wait() == (kill_after is not None), printed(process.stderr)
        return printed(process.stdout)


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("runs") / "whole"
    forked(text, output_dir, *COPIES)
    return output_dir


def test_a_killed_run_of_copies_goes_on_to_the_last_bit(text: Path, whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    forked(text, killed, *COPIES, kill_after=6)
    assert len([row for row in metrics_so_far(killed) if "loss" in row]) < 12, "the run was over before it was killed"
    found = ck.latest(killed)
    assert found is not None
    ck.verify(found)
    forked(text, killed, *COPIES, "--resume_from_checkpoint=latest")
    assert story(killed) == story(whole)
    ends = [ck.load(directory / "checkpoint-12") for directory in (killed, whole)]
    assert ends[0].state["loss_scaler"] == ends[1].state["loss_scaler"]
    assert ends[0].manifest.files == ends[1].manifest.files, "every byte of model, optimizer and random states"


def test_one_process_in_float32_goes_on_where_four_in_float16_were(
    text: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step that changes nothing, then an evaluation: it is that of the four."""
    saved = ck.load(whole / "checkpoint-8")
    assert saved.compute_type == "fp16"
    still = ("--optimizer.learning_rate=0", "--batch.size=8", "--steps=9", "--save_steps=9", "--eval_steps=9")
    more = ("--parallel.pipeline=1", "--sample_tokens=0", f"--resume_from_checkpoint={saved.path}")
    options = ("--optimizer.weight_decay=0.2", "--optimizer.beta1=0.5")
    local(text, tmp_path, *still, *more, *options)
    (evaluated,) = [row["eval_loss"] for row in metrics(tmp_path) if "eval_loss" in row]
    (expected,) = [row["eval_loss"] for row in metrics(whole) if row["step"] == 8 and "eval_loss" in row]
    assert evaluated == pytest.approx(expected, rel=1e-3)
    again = ck.load(tmp_path)
    groups = [group["options"] for part in again.manifest.parts for group in part.param_groups]
    assert {group["weight_decay"] for group in groups} == {0.2, 0.0}, "the options are those of this run"
    assert [group["betas"] for group in groups] == [[0.5, 0.95]] * 2
    for name in again.weight_map:
        assert torch.equal(saved.tensor(name), again.tensor(name)), name
    capsys.readouterr()
    assert cli.main(["verify", str(whole)]) == 0
    assert cli.main(["ls", str(whole)]) == 0
    assert "copies 2" in capsys.readouterr().out
