"""What the tests of `pl.Pipe` share: a model, and what one thread computes."""

from __future__ import annotations

import torch
from torch import nn

CPU2 = ["cpu", "cpu"]


def layers(number: int = 6, width: int = 8) -> nn.Sequential:
    """Linears and in-place activations, in float64."""
    kinds = [nn.Linear(width, width) if index % 2 == 0 else nn.ReLU(inplace=True) for index in range(number)]
    return nn.Sequential(*kinds).double()


def on_chunks(model: nn.Module, value: torch.Tensor, chunks: int) -> torch.Tensor:
    """What the pipe computes, in one thread."""
    return torch.cat([model(part) for part in value.chunk(chunks)])


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]
