"""`pipeloom train` with copies of the pipeline, 16-bit formats and other optimizers."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipeloom.cli import main
from pipeloom.ir import Op
from pipeloom.sim import Timeline

from .train_runs import local, metrics, run, story, text, words

__all__ = ["text"]

BATCH = ("--batch.size", "12", "--steps", "6", "--eval_steps", "3", "--save_steps", "0", "--sample_tokens", "0")


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One pipeline, all of its ranks in this process."""
    output_dir = tmp_path_factory.mktemp("copies") / "alone"
    local(text, output_dir, *BATCH, "--sample_tokens", "8")
    return output_dir


def assert_alike(one: Path, other: Path, tolerance: float = 1e-6) -> None:
    """Equal numbers of equal steps; `other` may have the last ones alone."""
    expected, found = story(one), story(other)
    for row, twin in zip(expected[-len(found) :], found, strict=True):
        for value, number in zip(row, twin, strict=True):
            assert (value is None) is (number is None)
            assert value is None or math.isclose(value, number, rel_tol=tolerance), (row, twin)


def assert_alike_beside(output_dir: Path) -> None:
    """What was predicted beside the ranks is what ran there: as many units, all of which took time.

    Replicas on one machine share the memory of full parameters: they gather in place, which may be predicted as 0 s.
    """
    found = json.loads((output_dir / "timelines.json").read_text())
    measured, predicted = (Timeline.from_json(json.dumps(found[kind])) for kind in ("measured", "predicted"))
    for ran, foreseen in zip(measured.background, predicted.background, strict=True):
        assert Counter(span.action for span in ran) == Counter(span.action for span in foreseen)
        assert {span.action.op for span in ran} >= {Op.UNSHARD, Op.REDUCE_GRAD}
        assert all(span.end > span.start for span in ran)
        assert all(span.end > span.start or span.action.op is Op.UNSHARD for span in foreseen)
    rows = [row for row in metrics(output_dir) if "loss" in row]
    assert all(0 < row["predicted_bubble_fraction"] < 1 and 0 < row["bubble_fraction"] < 1 for row in rows)


def copies(text: Path, output_dir: Path, *more: str) -> str:
    done = run(text, output_dir, *BATCH, *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_copies_train_as_one_pipeline_and_go_on_as_any_number(text: Path, alone: Path, tmp_path: Path) -> None:
    two, three = tmp_path / "two", tmp_path / "three"
    said = copies(
        text, two, "--parallel.data=2", "--parallel.data_strategy=zero2", "--parallel.order=pp,dp",
        "--parallel.data_granularity=chunk", "--batch.microbatches=2", "--save_steps=3",
    )  # fmt: skip
    assert "2 replicas of 2 ranks (zero2), 2 micro-batches per step" in said
    assert_alike(alone, two)
    assert all(len(row["peak_memory_bytes"]) == 4 for row in metrics(two) if "loss" in row)
    assert [row["live_activations"] for row in metrics(two) if "loss" in row] == [[2, 1]] * 6
    assert "1 of replica 1" in (two / "report.html").read_text()
    assert_alike_beside(two)
    # Nothing is repeated or skipped: other copies, other micro-batches, another strategy.
    copies(
        text, three, "--parallel.data=3", "--parallel.pipeline=1", "--batch.microbatches=1",
        f"--resume_from_checkpoint={two / 'checkpoint-3'}",
    )  # fmt: skip
    assert [row["step"] for row in metrics(three)] == [4, 5, 6, 6]
    assert_alike(alone, three)


def test_sharded_parameters_write_the_same_text(text: Path, alone: Path, tmp_path: Path) -> None:
    more = ("--batch.size=13", "--parallel.pipeline=1", "--sample_tokens=8")  # 7 samples and 6
    copies(
        text, tmp_path / "zero3", *more, "--parallel.data=2", "--parallel.data_strategy=zero3",
        "--parallel.data_granularity=microbatch",
    )  # fmt: skip
    assert_alike_beside(tmp_path / "zero3")
    local(text, tmp_path / "alone", *BATCH, *more)
    assert_alike(tmp_path / "alone", tmp_path / "zero3")


@pytest.mark.parametrize("name", ["adam", "sgd", "momentum", "lion", "adafactor", "muon"])
def test_every_optimizer_trains_and_goes_on_to_the_last_bit(text: Path, tmp_path: Path, name: str) -> None:
    chosen = (*BATCH, "--steps=4", "--eval_steps=0", f"--optimizer.name={name}")
    local(text, tmp_path / "whole", *chosen, "--save_steps=2")
    local(text, tmp_path / "rest", *chosen, f"--resume_from_checkpoint={tmp_path / 'whole' / 'checkpoint-2'}")
    assert story(tmp_path / "whole")[2:] == story(tmp_path / "rest")
    losses = [row["loss"] for row in metrics(tmp_path / "whole")]
    assert losses[-1] < losses[0]


def test_muon_updates_whole_matrices_on_one_copy_each(text: Path, tmp_path: Path) -> None:
    chosen = ("--parallel.pipeline=1", "--optimizer.name=muon")
    copies(
        text, tmp_path / "two", *chosen, "--parallel.data=2", "--batch.microbatches=2", "--save_steps=3",
        "--parallel.data_strategy=zero2",
    )  # fmt: skip
    resumed = f"--resume_from_checkpoint={tmp_path / 'two' / 'checkpoint-3'}"
    local(text, tmp_path / "one", *BATCH, *chosen)
    local(text, tmp_path / "rest", *BATCH, *chosen, resumed)
    assert_alike(tmp_path / "one", tmp_path / "two", 1e-3)  # its iteration is in bfloat16
    assert_alike(tmp_path / "one", tmp_path / "rest", 1e-3)


def test_another_optimizer_does_not_go_on(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    local(text, tmp_path / "out", *BATCH, "--steps=1", "--save_steps=1")
    more = ("--local", "--optimizer.name=muon", f"--resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-1'}")
    assert main(words(text, tmp_path / "other", *BATCH, *more)) == 2
    assert "saved with AdamW, not MuonWithAdamW" in capsys.readouterr().err


def _scales(output_dir: Path) -> list[tuple[Any, ...]]:
    return [(row["loss_scale"], row["skipped_steps"]) for row in metrics(output_dir) if "loss" in row]


def test_updates_whose_gradients_overflow_are_skipped_and_counted(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    half = (*BATCH, "--eval_steps=0", "--precision.dtype=fp16", "--precision.loss_scale_steps=2")
    local(text, out, *half, f"--precision.loss_scale={2.0**21}", "--save_steps=3")
    shown = capsys.readouterr().out
    scales = _scales(out)
    skipped = scales[-1][1]
    assert 1 <= skipped < 6
    assert scales[0] == (2.0**21, 1)
    assert f"skipped {skipped}" in shown
    for (scale, before), (after, _) in pairwise(scales):
        assert after in (scale / 2, scale, scale * 2), before
    losses = [row["loss"] for row in metrics(out)]
    assert losses[-1] < losses[0]
    assert "was not finite" not in (out / "report.html").read_text()
    # The scale is part of the state.
    local(text, tmp_path / "rest", *half, f"--resume_from_checkpoint={out / 'checkpoint-3'}")
    assert _scales(tmp_path / "rest") == scales[3:]
    assert story(tmp_path / "rest") == story(out)[3:]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_copies_in_16_bits_agree(text: Path, alone: Path, tmp_path: Path, dtype: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    more = ("--parallel.pipeline=1", f"--precision.dtype={dtype}")
    more += ("--precision.gradients=same",) if dtype == "bf16" else (f"--precision.loss_scale={2.0**21}",)
    copies(text, two, *more, "--parallel.data=2", "--batch.microbatches=2", "--parallel.data_strategy=zero1")
    local(text, one, *BATCH, *more)
    assert_alike(one, two, 1e-3)
    if dtype == "bf16":
        assert_alike(alone, two, 2e-2)
    else:
        assert _scales(one) == _scales(two)
