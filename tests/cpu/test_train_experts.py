"""`pipeloom train` with experts: what each step reports of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeloom.cli import main

from .train_runs import local, metrics, run, text, words

__all__ = ["text"]  # a fixture

EXPERTS = (
    "--model.experts=4", "--model.experts_every=2", "--model.router=topk", "--model.balance_weight=0.01",
    "--model.capacity_factor=1", "--steps=2", "--save_steps=0", "--eval_steps=1", "--sample_tokens=0",
)  # fmt: skip


def test_experts_and_their_losses_are_in_the_metrics(text: Path, tmp_path: Path) -> None:
    """The same numbers on one rank, and of two processes without a barrier."""
    local(text, tmp_path / "one", "--parallel.pipeline=1", *EXPERTS)
    done = run(text, tmp_path / "two", "--optimizer.barrier=false", *EXPERTS)
    assert done.returncode == 0, done.stderr
    assert " + 0." in done.stdout  # the auxiliary loss, behind the loss
    one, *others = ([row for row in metrics(tmp_path / name) if "loss" in row] for name in ("one", "two"))
    assert len(one) == 2
    for rows in (one, *others):
        for row, wanted in zip(rows, one, strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert row["auxiliary_loss"] == pytest.approx(wanted["auxiliary_loss"], rel=1e-4)
            assert list(row["experts"]) == ["blocks.1.experts", "blocks.3.experts"]
            for layer, found in row["experts"].items():
                assert sum(found["load"]) == pytest.approx(4)
                for key in ("dropped", "entropy", "balance_loss"):
                    assert found[key] == pytest.approx(wanted["experts"][layer][key], rel=1e-4, abs=1e-6), (layer, key)
            balance = sum(found["balance_loss"] for found in row["experts"].values())
            assert row["auxiliary_loss"] == pytest.approx(0.01 * balance, rel=1e-5)
    for name in ("one", "two"):
        assert "load of 4 experts by step" in (tmp_path / name / "report.html").read_text()


def test_streams_report_experts(text: Path, tmp_path: Path) -> None:
    local(text, tmp_path, "--schedule=pipedream", *EXPERTS)
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert [row["auxiliary_loss"] > 0 for row in rows] == [True] * 2
    assert all(sum(row["experts"]["blocks.3.experts"]["load"]) == pytest.approx(4) for row in rows)


def test_a_default_that_is_written_out_resumes(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = (
        "--model.experts=2", "--model.router=expert-choice", "--eval_steps=0", "--sample_tokens=0", "--save_steps=1",
    )  # fmt: skip
    local(text, tmp_path, *chosen, "--steps=1")
    assert "\nmodel.router=expert-choice: whether an expert takes a token" in capsys.readouterr().out
    explicit = ("--model.top_k=2", "--model.expert_width=64", "--model.kv_heads=2", "--resume_from_checkpoint=latest")
    local(text, tmp_path, *chosen, "--steps=2", *explicit)
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2]
    assert main(words(text, tmp_path, "--local", *chosen, "--model.top_k=1", "--resume_from_checkpoint=latest")) == 2
    assert "model.top_k=1: checkpoint" in capsys.readouterr().err
    other = "--model.router=switch"  # which has another default of capacity_factor
    assert main(words(text, tmp_path, "--local", *chosen, other, "--resume_from_checkpoint=latest")) == 2
    assert "model.router=switch: checkpoint " in capsys.readouterr().err
