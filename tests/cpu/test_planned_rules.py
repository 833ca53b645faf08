"""Gradient rules of a model's own between its layers: told where several stages apply them to parts of a gradient."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl

LAYERS = ["a", "h.*", "o"]


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Clipped(nn.Linear):
    """The rule is inside of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return Clip.apply(super().forward(x))


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    return x


class Net(nn.Module):
    def __init__(self, rule: Any, *, residual: bool, layer: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.o = nn.Linear(5, 8), nn.Linear(8, 3)
        self.h = nn.ModuleList(layer(8, 8) for _ in range(4))
        self.rule, self.residual = rule, residual

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        for layer in self.h:
            y = self.rule(torch.tanh(layer(x)))
            x = x + y if self.residual else y
        return self.o(x)


def train(model: nn.Module, num_ranks: int) -> tuple[list[str], float]:
    """The warnings, and the largest error of a gradient."""
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    schedule = pl.schedules.build("1f1b", num_ranks=num_ranks, num_microbatches=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pl.Pipeline(twin, schedule, loss_fn=F.mse_loss, layers=LAYERS) as pipe:
            pipe.step(x, y)
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.mse_loss(model(a), b) / 2).backward()
    pairs = zip(twin.parameters(), model.parameters(), strict=True)
    return [str(each.message) for each in caught], max(float((a.grad - b.grad).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("rule", "word"), [(Clip.apply, "applies Clip to"), (hooked, "applies a hook of a tensor to")])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rule_that_several_stages_apply_is_told(rule: Any, word: str, num_ranks: int) -> None:
    told, error = train(Net(rule, residual=True).double(), num_ranks)
    assert error > 1e-6
    assert any(word in line and "part of the gradient" in line for line in told)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("rule", "residual", "layer"),
    [(Clip.apply, False, nn.Linear), (nn.Identity(), True, Clipped), (nn.Identity(), True, nn.Linear)],
)
def test_a_rule_that_one_stage_applies_is_exact(rule: Any, residual: bool, layer: Any, num_ranks: int) -> None:
    told, error = train(Net(rule, residual=residual, layer=layer).double(), num_ranks)
    assert error < 1e-14
    assert not [line for line in told if "part of the gradient" in line]
