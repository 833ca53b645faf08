"""The host does not wait for the device inside a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch

import pipeloom as pl
from tests.cpu.reference import language_loss
from tests.gpu.gpt import batch, larger, larger_batch, small


@contextmanager
def no_waits() -> Iterator[None]:
    """Operations of torch that make the host wait raise inside the block, on every thread."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_check_would_notice() -> None:
    loss = torch.ones((), device="cuda:0")
    with no_waits(), pytest.raises(RuntimeError, match="synchroniz"):
        loss.item()


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "seq1f1b"])
def test_a_step_in_one_process(name: str, transport: str) -> None:
    sizes = {"num_slices": 2} if name == "seq1f1b" else {}
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4, **sizes)
    with pl.Pipeline(small(), schedule, loss_fn=language_loss, transport=transport) as pipe:
        batches = [batch(8, seed=step) for step in range(4)]
        for inputs, targets in batches[:2]:
            pipe.step(inputs, targets)
        with no_waits():
            losses = [pipe.step(inputs, targets) for inputs, targets in batches[2:]]
        assert all(loss.isfinite() for loss in losses)


def test_a_step_that_recomputes() -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    with pl.Pipeline(larger(2, 64), schedule, loss_fn=language_loss, recompute="full") as pipe:
        inputs, targets = larger_batch(8)
        for step in range(4):
            with no_waits() if step >= 2 else nullcontext():
                pipe.step(inputs, targets)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_and_its_update(precision: str) -> None:
    """Only clipping reads a value on the host: the norm."""
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    inputs, targets = larger_batch(8)
    with pl.Pipeline(larger(2, 64), schedule, loss_fn=language_loss, precision=precision) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, fused=True)
        for step in range(4):
            with no_waits() if step >= 2 else nullcontext():
                pipe.step(inputs, targets)
            pl.clip_grad_norm(pipe, 1.0)
            with no_waits() if step >= 2 else nullcontext():
                pl.update_parameters(optimizer)
                optimizer.zero_grad()
