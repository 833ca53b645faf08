"""Stages on several devices, `pl.Pipe`, and number formats."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.training import BarrierStep
from tests.cpu.pipe_models import layers, on_chunks
from tests.cpu.reference import accumulate, language_loss, make_mlp
from tests.gpu.gpt import CUDA, F64, batch, larger, larger_batch, small


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize("devices", [("cpu", CUDA), (CUDA, "cpu"), (CUDA, "cpu", CUDA)])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_on_the_host_and_on_the_device(name: str, devices: tuple[str, ...], transport: str) -> None:
    parts = list(make_mlp(len(devices), dtype=F64))
    expected = nn.Sequential(*copy.deepcopy(parts))
    stages = [part.to(device) for part, device in zip(parts, devices, strict=True)]
    x, y = torch.randn(2, 9, 8, dtype=F64)
    loss = accumulate(expected, F.mse_loss, x, y, 4)
    schedule = pl.schedules.build(name, num_ranks=len(devices), num_microbatches=4)
    with pl.Pipeline(stages, schedule, loss_fn=F.mse_loss, transport=transport) as pipe:
        found = pipe.step(x.to(devices[0]), y.to(devices[-1]))
        torch.testing.assert_close(found.cpu(), loss, rtol=1e-12, atol=0)
        for stage, plain in zip(stages, expected, strict=True):
            for one, other in zip(stage.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("checkpoint", ["never", "always"])
@pytest.mark.parametrize("devices", [[CUDA], [CUDA, CUDA], ["cpu", CUDA], [CUDA, "cpu"]])
def test_pipe(devices: list[str], checkpoint: str) -> None:
    plain, model = layers(), layers()
    model.load_state_dict(plain.state_dict())
    balance = [6] if len(devices) == 1 else [2, 4]
    pipe = pl.Pipe(model, balance, chunks=4, devices=devices, checkpoint=checkpoint)
    for _ in range(2):
        x = torch.randn(10, 8, dtype=F64)
        output, expected = pipe(x.to(devices[0])), on_chunks(plain, x, 4)
        assert output.device == torch.device(devices[-1])
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-12, atol=1e-14)
        output.square().sum().backward()
        expected.square().sum().backward()
    for (name, found), wanted in zip(pipe.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad.cpu(), wanted.grad, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_evaluation_and_outputs() -> None:
    model, expected = small(), small()
    inputs, targets = batch(7)
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
    with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe.forward(inputs), expected(inputs), rtol=1e-12, atol=1e-14)
        wanted = language_loss(expected(inputs), targets)
        torch.testing.assert_close(pipe.evaluate(inputs, targets), wanted, rtol=1e-12, atol=0)


def _gradients(name: str, num_ranks: int, precision: str) -> dict[str, torch.Tensor]:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    with pl.Pipeline(larger(4, 64), schedule, loss_fn=language_loss, precision=precision) as pipe:
        if precision == "fp16":
            pipe.loss_scale = 1024.0
        pipe.step(*larger_batch(8))
        pl.clip_grad_norm(pipe, 1e9)  # gradients are divided by the scale
        return {key: parameter.grad.clone() for key, parameter in pipe.named_parameters()}


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_formats(precision: str) -> None:
    """Bitwise the same for every schedule, and near those of float32."""
    exact, one, two = (
        _gradients("gpipe", 1, "fp32"),
        _gradients("gpipe", 1, precision),
        _gradients("1f1b", 2, precision),
    )
    for name, gradient in exact.items():
        assert one[name].dtype == torch.float32
        assert torch.equal(one[name], two[name]), name
        error = (one[name] - gradient).norm() / gradient.norm()
        assert error < 0.05, (name, float(error))


def test_a_loss_scale_that_is_too_large_is_lowered() -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    scaler = pl.LossScaler(2.0**40)
    with pl.Pipeline(larger(2, 64), schedule, loss_fn=language_loss, precision="fp16") as pipe:
        step = BarrierStep(pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-3), max_norm=1.0, scaler=scaler)
        updates = [update for _ in range(40) for update in step.step(*larger_batch(4))]
    assert updates[0].skipped
    assert updates[-1].applied
    assert scaler.num_skipped < 40
