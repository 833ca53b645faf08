"""`pipeloom train --parallel.expert`: the same run on other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.test_train_copies import assert_alike

from .train_runs import local, metrics, text

__all__ = ["text"]  # a fixture

RUN = (
    *("--model.experts=4", "--model.router=sigmoid", "--model.shared_experts=1", "--model.width=32", "--model.heads=2"),
    *("--parallel.data=2", "--batch.size=9", "--batch.microbatches=2", "--steps=3", "--eval_steps=3"),
    *("--save_steps=0", "--sample_tokens=3"),
)


@pytest.mark.parametrize(
    "layout",
    [("--parallel.tensor=2", "--parallel.sequence=true", "--parallel.pipeline=1"), ("--parallel.data_strategy=zero3",)],
    ids=["tensor", "zero3"],
)
def test_experts_on_other_processes_train_alike(text: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    for degree in (1, 2):
        local(text, tmp_path / str(degree), *RUN, *layout, f"--parallel.expert={degree}")
    assert_alike(tmp_path / "1", tmp_path / "2", 1e-6)
    one, two = ([row for row in metrics(tmp_path / name) if "experts" in row] for name in ("1", "2"))
    assert len(one) == len(two) > 0
    for row, other in zip(one, two, strict=True):
        for layer, found in row["experts"].items():
            assert other["experts"][layer]["load"] == pytest.approx(found["load"]), layer
