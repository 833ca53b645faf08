"""A model whose layers declare auxiliary losses, and the plain loop with which a pipeline is compared."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.common.division import even_parts
from pipeloom.slicing import causal_attention

F64 = torch.float64
WIDTH, TOKENS = 8, 6


class Layer(nn.Module):
    """Attention and a product: [B, S, W] -> [B, S, W]. Declares what `kind` says.

    "plain"     nothing
    "mean"      a loss, with a path to its own weights and to those of the layers before
    "twice"     two losses of one name
    "own"       a loss of its own weights alone: a parameter of no dimension
    "constant"  a loss without a graph

    Observes which of three scores is the largest.
    """

    sliceable = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = causal_attention(q, k, v, self).transpose(1, 2).flatten(2)
        scores = self.gate(y) * self.scale
        if self.kind in ("mean", "twice"):
            pl.auxiliary_loss(scores.square().mean(), 0.3, "load")
        if self.kind == "twice":
            pl.auxiliary_loss((x * y).mean(), 0.7, "load", module=self)
        if self.kind == "own":
            pl.auxiliary_loss(self.scale, 0.5, "scale")
        if self.kind == "constant":
            pl.auxiliary_loss(scores.detach().mean(), 2.0, "mean")
        largest = nn.functional.one_hot(scores.argmax(-1), 3).sum((0, 1))
        pl.observe("largest", largest, module=self)
        return x + torch.tanh(self.out(y * scores.softmax(-1)[..., :1]))


class Counting(Layer):
    """Adds up after each step what it observed."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.register_buffer("seen", torch.zeros(3, dtype=F64))

    def after_step(self, observed: dict[str, Tensor]) -> None:
        self.seen += observed["largest"]


KINDS = ("mean", "plain", "twice", "own", "constant", "mean")


def make_model(kinds: tuple[str, ...] = KINDS, layer: type[Layer] = Layer) -> nn.Sequential:
    model = nn.Sequential(*map(layer, kinds)).to(F64)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=F64) / WIDTH**0.5)
    return model


def make_batch(samples: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    one, other = (torch.randn(samples, TOKENS, WIDTH, generator=generator, dtype=F64) for _ in range(2))
    return one, other


class Expected(NamedTuple):
    """Of the plain loop: the loss of loss_fn alone, gradients; by layer, weighted values and quantities."""

    loss: Tensor
    gradients: dict[str, Tensor]
    weighted: dict[str, float]
    largest: dict[str, Tensor]


mse = nn.functional.mse_loss


def plain_loop(model: nn.Module, batches: list[tuple[Tensor, Tensor]], num_microbatches: int) -> Expected:
    """Gradient accumulation over the micro-batches of all replicas, one after another."""
    total = sum(len(inputs) for inputs, _ in batches)
    loss, weighted, largest = torch.zeros((), dtype=F64), Counter[str](), {}
    for inputs, targets in batches:
        sizes = even_parts(len(inputs), num_microbatches)
        for x, y in zip(inputs.split(sizes), targets.split(sizes), strict=True):
            share, auxiliary = len(x) / total, torch.zeros((), dtype=F64)
            for name, layer in model.named_children():
                with pl.auxiliary_losses() as found:
                    x = layer(x)
                auxiliary = auxiliary + found.total()
                if found.losses:
                    weighted[name] += found.total().item() * share
                largest[name] = largest.get(name, 0) + found.observed[0].values
            own = mse(x, y)
            ((own + auxiliary) * share).backward()
            loss += own.detach() * share
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Expected(loss, gradients, dict(weighted), largest)


def compare(pipe: pl.Pipeline, loss: Tensor, expected: Expected) -> None:
    """Loss, gradients, values and quantities; gradients of one step."""
    torch.testing.assert_close(loss, expected.loss, rtol=1e-12, atol=0)
    for name, parameter in pipe.named_parameters():
        wanted = expected.gradients.get(name)
        if wanted is None:
            assert parameter.grad is None, name
            continue
        if name in pipe.state.ranges:
            start, stop, _ = pipe.state.ranges[name]
            wanted = wanted.flatten()[start:stop]
        if wanted.numel():
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15, msg=lambda m, n=name: f"{n} {m}")
    weighted = {
        layer: sum(loss.weighted for loss in found.values()) for layer, found in pipe.auxiliary_losses().items()
    }
    assert weighted == pytest.approx(expected.weighted, rel=1e-12, abs=1e-15)
    quantities = pipe.observations()
    assert quantities.keys() == expected.largest.keys()
    for layer, found in expected.largest.items():
        assert torch.equal(quantities[layer]["largest"], found.double()), layer
