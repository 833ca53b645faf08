"""Linear layers that multiply in 8 bits."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl


def _gradients(layer: nn.Linear, x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    layer.zero_grad()
    result = layer(x)
    (result * weights).sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_results_are_near_those_of_full_products(dtype: torch.dtype, bias: bool, scale: float) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, bias=bias).to(dtype)
    x, weights = (torch.randn(2, 32, size) * scale for size in (64, 48))
    expected = _gradients(layer, x.to(dtype), weights.to(dtype))
    assert pl.use_fp8(nn.Sequential(layer)) == ["0"]
    found = _gradients(layer, x.to(dtype), weights.to(dtype))
    bounds = (0.045, 0.07, 0.07, 0.01)  # 3 bits of mantissa in both factors; 2 of gradients; sums have all bits
    for one, other, bound in zip(expected, found, bounds, strict=False):
        assert other.dtype == dtype
        assert (one.float() - other.float()).norm() / one.float().norm() < bound
    assert not torch.equal(expected[2], found[2])


def test_zeros_stay_zeros() -> None:
    layer = nn.Linear(16, 16, bias=False)
    pl.use_fp8(layer)
    result = layer(torch.zeros(16, 16))
    result.sum().backward()
    assert not result.any()
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


def test_other_sizes_and_classes_multiply_as_before() -> None:
    class Own(nn.Linear):
        pass

    odd, own, even = nn.Linear(16, 24), Own(16, 16), nn.Linear(16, 32)
    assert pl.use_fp8(nn.Sequential(odd, own, even)) == ["2"]
    x = torch.randn(3, 16)  # not a multiple of 16 rows
    assert torch.equal(even(x), F.linear(x, even.weight, even.bias))


def test_a_pipeline_trains_as_with_full_products() -> None:
    def last_loss(*, eight_bits: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)))
        assert not eight_bits or len(pl.use_fp8(model)) == 8
        pipe = pl.Pipeline(model, pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=4), loss_fn=F.mse_loss)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        x, y = torch.randn(64, 32), torch.randn(64, 32)
        for _ in range(20):
            loss = pipe.step(x, y)
            optimizer.step()
            optimizer.zero_grad()
        return float(loss)

    full, found = last_loss(eight_bits=False), last_loss(eight_bits=True)
    assert full < 0.7
    assert found == pytest.approx(full, rel=0.05)
    assert found != full
