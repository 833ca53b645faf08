"""Recomputation and offload together with copies of the pipeline, and in `pipeloom train`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipeloom as pl
from pipeloom.cli import main
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens
from tests.cpu.test_train import metrics, story, text, words  # noqa: F401  # text is a fixture

CASES = [
    ("ddp", None, "1f1b", "fp32"),
    ("zero1", None, "zb-h1", "bf16"),
    ("zero3", "step", "zb-v", "fp32"),
    ("zero3", "chunk", "bfs", "bf16"),
    ("zero3", "microbatch", "zb-h1", "fp32"),
    ("zero3", "microbatch", "interleaved", "bf16"),
]


def _steps(mesh: pl.Mesh, case: tuple, directory: str | None, recompute: str) -> list[float]:
    """Losses of three steps; with a directory, states and activations go there."""
    strategy, granularity, name, precision = case
    model = make_gpt(tied=True)
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    offload = pl.OffloadActivations(f"disk:{directory}", least_bytes=64, beside=0) if directory else None
    data = pl.DataParallel(strategy, granularity) if granularity else pl.DataParallel(strategy)
    options = {"mesh": mesh, "data": data, "precision": precision, "recompute": recompute, "offload": offload}
    with pl.Pipeline(model, schedule, loss_fn=language_loss, transport="torch", **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        if directory:
            optimizer = pl.OffloadedOptimizer(optimizer, f"disk:{directory}", portion_bytes=2000, least_bytes=64)
        losses = []
        for _ in range(3):
            x, y = tokens(16)
            half = slice(0, 8) if mesh.coordinate("dp") == 0 else slice(8, 16)
            losses.append(pipe.step(x[half], y[half]).item())
            pl.clip_grad_norm(pipe, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if directory:
            assert optimizer.moved_bytes > 0
            optimizer.close()
        return losses


def _compare(rank: int, directory: str) -> None:
    mesh = pl.Mesh(pp=2, dp=2)
    for case in CASES:
        expected = _steps(mesh, case, None, "none")
        assert expected[-1] < expected[0]
        for where, recompute in ((None, "full"), (directory, "none"), (directory, "full")):
            assert _steps(mesh, case, where, recompute) == expected, (case, where, recompute)


def test_with_copies_losses_are_bitwise_those_without(tmp_path: Path) -> None:
    run_ranks(_compare, 4, str(tmp_path))
    assert not list(tmp_path.iterdir())
