"""Every schedule of the table on a CUDA device: losses and gradients of gradient accumulation on the same device."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from tests.cpu.every_schedule import Case, grid, is_bitwise, train_and_compare
from tests.cpu.reference import language_loss
from tests.cpu.test_skips import train as train_skips
from tests.gpu.gpt import CUDA, check_step, larger, larger_batch, small

THREADED = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")
SLICED = {"terapipe": 1, "seq1f1b": 1, "seq1f1b-interleaved": 2}


@cache
def _cases(num_ranks: int) -> list[Case]:
    return grid(num_ranks, 1)


@pytest.mark.parametrize("family", pl.schedules.SYNCHRONOUS)
def test_on_loopback(family: str) -> None:
    for case in _cases(4):
        if case.family == family:
            train_and_compare(case, "loopback", CUDA)


@pytest.mark.parametrize("family", THREADED)
def test_with_a_thread_for_each_rank(family: str) -> None:
    for case in _cases(2):
        if case.family == family:
            train_and_compare(case, "threads", CUDA)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("name", SLICED)
def test_slices(name: str, transport: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4, num_slices=2, num_chunks=SLICED[name])
    with pl.Pipeline(small(), schedule, loss_fn=language_loss, transport=transport) as pipe:
        check_step(pipe, small(), 6, rtol=1e-12)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_recomputation(name: str, recompute: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    with pl.Pipeline(small(), schedule, loss_fn=language_loss, recompute=recompute) as pipe:
        check_step(pipe, small(), 8, rtol=0.0 if is_bitwise(pipe.schedule, tied=False) else 1e-12)


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_draws_the_masks_of_the_forward(recompute: str) -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    found: list[list[Tensor]] = []
    for kind in ("none", recompute):
        with pl.Pipeline(larger(4, 64, dropout=0.2), schedule, loss_fn=language_loss, recompute=kind) as pipe:
            torch.manual_seed(3)
            loss = pipe.step(*larger_batch(8))
            gradients = [parameter.grad for parameter in pipe.parameters() if parameter.grad is not None]
            found.append([loss, *gradients])
    for number, (one, other) in enumerate(zip(*found, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_values_that_skip_stages(name: str, transport: str) -> None:
    """Against the CPU, to 1e-12."""
    train_skips(pl.schedules.build(name, num_ranks=3, num_microbatches=6), transport, device=CUDA)
