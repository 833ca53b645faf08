"""`pipeloom train` with experts on several replicas: goes on after a kill, and from checkpoints of any other layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeloom.plan.memory import read_memory
from pipeloom.train import checkpoint as ck

from .test_train_resharding import forked
from .train_runs import local, metrics, metrics_so_far, story, text

__all__ = ["text"]  # a fixture

MODEL = ("--model.experts=4", "--model.experts_every=2", "--model.router=sigmoid", "--batch.size=8")
RUN = (
    *MODEL,
    *("--parallel.pipeline=2", "--parallel.data=2", "--parallel.expert=2", "--parallel.data_strategy=zero1"),
    *("--precision.dtype=fp16", "--precision.loss_scale_steps=2", "--model.dropout=0.1", "--batch.microbatches=2"),
    *("--steps=12", "--save_steps=4", "--eval_steps=4", "--sample_tokens=0"),
)
FOUR = ("--parallel.pipeline=1", "--parallel.data=4", "--batch.microbatches=2")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    output_dir = tmp_path_factory.mktemp("runs") / "whole"
    forked(text, output_dir, *RUN)
    return output_dir


def test_a_killed_run_goes_on_to_the_last_bit(text: Path, whole: Path, tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    forked(text, killed, *RUN, kill_after=6)
    assert len([row for row in metrics_so_far(killed) if "loss" in row]) < 12, "the run was over before it was killed"
    found = ck.latest(killed)
    assert found is not None
    ck.verify(found)
    forked(text, killed, *RUN, "--resume_from_checkpoint=latest")
    assert story(killed) == story(whole)
    ends = [ck.load(directory / "checkpoint-12") for directory in (killed, whole)]
    assert ends[0].manifest.files == ends[1].manifest.files, "every byte of model, optimizer and random states"


def tensors(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = ck.load(path)
    return {name: checkpoint.tensor(name) for name in sorted({key.partition("[")[0] for key in checkpoint.weight_map})}


def test_other_layouts_go_on_where_a_run_was(text: Path, whole: Path, tmp_path: Path) -> None:
    """A step that changes nothing, and a checkpoint of it: ep2 -> one process -> ep4 -> ep2 with tp2, zero3."""
    found = [whole / "checkpoint-8"]
    wanted = tensors(found[0])
    assert {"blocks.1.experts.up", "blocks.1.experts.router.weight"} <= wanted.keys()
    still = (*MODEL, "--optimizer.learning_rate=0", "--eval_steps=1", "--sample_tokens=0")
    layouts = [
        ("--parallel.pipeline=1", "--batch.microbatches=4"),
        (*FOUR, "--parallel.expert=4"),
        ("--parallel.pipeline=1", "--parallel.data=2", "--parallel.tensor=2", "--parallel.expert=2"),
        (*FOUR, "--parallel.expert=2", "--parallel.data_strategy=zero3"),
    ]
    for number, layout in enumerate(layouts):
        step, output_dir = 9 + number, tmp_path / str(number)
        options = (f"--steps={step}", f"--save_steps={step}", f"--resume_from_checkpoint={found[-1]}")
        (forked if number else local)(text, output_dir, *still, *layout, *options)
        found.append(output_dir / f"checkpoint-{step}")
        again = tensors(found[-1])
        assert again.keys() == wanted.keys()
        for name, value in wanted.items():
            if not name.endswith("bias"):  # of the router: each step moves it
                assert torch.equal(value, again[name]), (layout, name)
        (evaluated,) = [row["eval_loss"] for row in metrics(output_dir) if "eval_loss" in row]
        (expected,) = [row["eval_loss"] for row in metrics(whole) if row["step"] == 8 and "eval_loss" in row]
        assert evaluated == pytest.approx(expected, rel=1e-3)
        if number:
            for row in read_memory(output_dir):
                for kind, size in row.measured.items():
                    if size is not None and kind in ("parameters", "masters", "optimizer", "gradients"):
                        assert size == pytest.approx(row.predicted[kind], rel=1e-3, abs=64), (layout, row.process, kind)
