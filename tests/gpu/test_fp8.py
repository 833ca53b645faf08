"""Products of 8 bits on the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom as pl
from tests.gpu.gpt import CUDA

needs_units = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="products of 8 bits need compute capability 8.9",
)


@needs_units
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_near_those_of_full_products(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(512, 256, device=CUDA, dtype=dtype)
    x = torch.randn(4, 128, 512, device=CUDA, dtype=dtype)
    weights = torch.randn(4, 128, 256, device=CUDA, dtype=dtype)
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        result = layer(given)
        (result * weights).sum().backward()
        assert given.grad is not None
        assert layer.weight.grad is not None
        found.append([result.detach(), given.grad, layer.weight.grad])
        pl.use_fp8(layer)
    for one, other, bound in zip(*found, (0.045, 0.07, 0.07), strict=True):
        assert (one.float() - other.float()).norm() / one.float().norm() < bound
        assert not torch.equal(one, other)
