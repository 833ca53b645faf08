"""Runs of `pipeloom train` whose processes share one GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpu.train_runs import text, words  # noqa: F401  # a fixture


def _start(texts: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeloom", *words(texts, out, *more)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _printed(process: subprocess.Popen[str]) -> str:
    """All that a run has printed; one that does not end is killed, and so are its ranks."""
    try:
        return process.communicate(timeout=90)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return "killed after 90 s: " + process.communicate()[0]


def _losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def _tensors(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("**/*.safetensors"))}


def test_runs_of_the_command_on_one_gpu(text: Path, tmp_path: Path) -> None:  # noqa: F811
    pipeline = ("--parallel.pipeline=2", "--schedule=1f1b")
    runs = {
        "one": ("--local", *pipeline),
        "two": pipeline,
        "zero3": (
            "--parallel.pipeline=1",
            "--parallel.data=2",
            "--parallel.data_strategy=zero3",
            "--batch.microbatches=3",
        ),
        "tensor": ("--parallel.pipeline=1", "--parallel.tensor=2"),
        "zb-v": ("--parallel.pipeline=2", "--schedule=zb-v"),
        "bf16": (*pipeline, "--precision.dtype=bf16"),
    }
    started = {name: _start(text, tmp_path / name, *more) for name, more in runs.items()}
    printed = {name: _printed(process) for name, process in started.items()}
    failed = {name: printed[name] for name, process in started.items() if process.returncode}
    assert not failed, "\n".join(f"--- {name}\n{lines}" for name, lines in failed.items())
    assert "2 processes share GPU 0" in printed["two"]
    assert "share GPU" not in printed["one"]
    expected = _losses(tmp_path / "one")
    assert len(expected) == 9
    for name in ("two", "zero3", "tensor", "zb-v"):
        assert _losses(tmp_path / name) == pytest.approx(expected, rel=1e-3), name
    assert _losses(tmp_path / "bf16") == pytest.approx(expected, rel=0.05)
    memory = json.loads((tmp_path / "two" / "metrics.jsonl").read_text().splitlines()[0])
    assert len(memory["peak_memory_bytes"]) == 2
    assert all(0 < peak < 1 << 30 for peak in memory["peak_memory_bytes"])

    resumed = _start(
        text, tmp_path / "again", *pipeline, f"--resume_from_checkpoint={tmp_path / 'two' / 'checkpoint-3'}"
    )
    lines = _printed(resumed)
    assert resumed.returncode == 0, lines
    assert _losses(tmp_path / "again") == _losses(tmp_path / "two")[3:]
    assert _tensors(tmp_path / "again" / "checkpoint-9") == _tensors(tmp_path / "two" / "checkpoint-9")


def test_processes_without_a_gpu_compute_on_the_cpu(text: Path, tmp_path: Path) -> None:  # noqa: F811
    command = [sys.executable, "-m", "pipeloom", *words(text, tmp_path, "--steps=3", "--parallel.pipeline=2")]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=hidden, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "share GPU" not in done.stdout + done.stderr
