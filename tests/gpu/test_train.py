"""`pipeloom train` on a CUDA device, all ranks in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.train_runs import local, metrics, text

__all__ = ["text"]  # a fixture

TWO = ("--parallel.pipeline", "2")


def _losses(text: Path, output_dir: Path, *more: str) -> list[float]:
    local(text, output_dir, *more)
    return [row["loss"] for row in metrics(output_dir) if "loss" in row]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_schedules_train_alike(text: Path, tmp_path: Path, dtype: str) -> None:
    plain = _losses(text, tmp_path / "plain", *TWO, "--precision.dtype", dtype)
    assert plain[-1] < plain[0]
    others = _losses(text, tmp_path / "zb", *TWO, "--precision.dtype", dtype, "--schedule", "zb-h1")
    assert others == pytest.approx(plain, rel=1e-3 if dtype == "fp32" else 3e-2)


@pytest.mark.usefixtures("same_bits")
def test_graphs_change_no_loss(text: Path, tmp_path: Path) -> None:
    plain = _losses(text, tmp_path / "plain", *TWO)
    assert _losses(text, tmp_path / "graphs", *TWO, "--graphs", "true") == plain


@pytest.mark.usefixtures("same_bits")
def test_a_run_goes_on_from_its_checkpoint(text: Path, tmp_path: Path) -> None:
    whole = _losses(text, tmp_path / "whole", *TWO)
    local(text, tmp_path / "parts", *TWO, "--steps", "6")
    assert _losses(text, tmp_path / "parts", *TWO, "--steps", "9")[-3:] == whole[-3:]


@pytest.mark.usefixtures("no_compile_workers")
def test_compiled_blocks(text: Path, tmp_path: Path) -> None:
    plain = _losses(text, tmp_path / "plain", *TWO)
    assert _losses(text, tmp_path / "compiled", *TWO, "--compile", "true") == pytest.approx(plain, rel=1e-3)
