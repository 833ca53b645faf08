"""Forwards between whose layers something happens: stages compute what the model does, or refuse."""

from __future__ import annotations

import copy
import operator
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.split import split
from pipeloom.split.planned.tracking.origins import DRAWN, IN_UNIT, Origins

LAYERS = ["first", "blocks.*", "last"]


@pytest.fixture(autouse=True)
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


class Net(nn.Module):
    """Linear layers that begin as the identity; subclasses run them."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("seen", torch.ones(width), persistent=False)
        for layer in (self.first, *self.blocks, self.last):
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Skips(Net):
    """The first layer's result is read at the end: of some shapes, constants and values."""

    def forward(self, x, mode="chain", power=1):
        first = self.first(x)
        y = self.through(first)
        if x.shape[1] > 2 or mode == "skip" or power > 1 or first.mean() > 10:
            y = y * first**power
        return self.last(y)


def compared(model, inputs, targets, pipe):
    """The largest difference in loss and gradients to accumulation over the same micro-batches."""
    plain = copy.deepcopy(model)
    plain.zero_grad(), model.zero_grad()
    loss = pipe.step(inputs, targets)
    expected = torch.zeros(())
    for index in range(4):
        part = {n: v.chunk(4)[index] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        term = F.mse_loss(plain(**part), targets.chunk(4)[index]) / 4
        term.backward()
        expected = expected + term.detach()
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    worst = max((gradients[name] - p.grad).abs().max().item() for name, p in plain.named_parameters())
    return max(worst, abs(float(loss - expected)))


def pipeline(model, ranks=3, schedule="zb-h1", loss_fn=F.mse_loss):
    built = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=4)
    return pl.Pipeline(model, built, layers=LAYERS, loss_fn=loss_fn)


def test_what_later_stages_read_depends_on_shapes_constants_and_values():
    model = Skips()
    with pipeline(model) as pipe:
        for more in ({}, {"mode": "skip"}, {"power": 2}, {"shape": 3}, {"shift": 100.0}, {}):
            x = torch.randn(8, more.pop("shape", 2), 4) + more.pop("shift", 0.0)
            assert compared(model, {"x": x, **more}, torch.randn_like(x), pipe) < 1e-9, more


def drawn_by_python_and_numpy(x):
    return x * random.random() + torch.from_numpy(np.random.randn(len(x), 4))


def drawn_by_attention(x):
    return F.scaled_dot_product_attention(x[:, :, None], x[:, :, None], x[:, :, None], dropout_p=0.5)[..., 0]


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        torch.bernoulli,
        lambda x: torch.rand(len(x), 4),
        lambda x: torch.distributions.Beta(x, x).sample(),
        lambda x: torch.distributions.Gamma(x, x).sample(),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
        lambda x: torch.ops.aten.bernoulli.p(x, 0.5),
        drawn_by_attention,
        drawn_by_python_and_numpy,
    ],
)
def test_stages_draw_the_same_numbers_between_layers(draw):
    """The model subtracts what it has drawn, or compares with it."""

    class Denoiser(Net):
        def forward(self, x):
            noise = draw(torch.full_like(x, 0.5))
            kept = F.dropout(self.first(noise), 0.5, self.training)
            return self.last(self.through(kept)) - kept, kept, noise

    def loss_fn(output, _):
        zero, kept, noise = output
        return zero.abs().sum() + (torch.where(kept == 0, 0, kept / 2 - noise)).abs().sum()

    x = torch.zeros(8, 4)
    with pipeline(Denoiser(), loss_fn=loss_fn) as pipe:
        before = random.getstate()
        losses = [float(pipe.step(x, x)) for _ in range(2)]
    assert (losses, random.getstate()) == ([0, 0], before)
    if draw is drawn_by_python_and_numpy:
        built = pl.schedules.build("gpipe", num_ranks=3, num_microbatches=4)
        with (
            pl.Pipeline(Denoiser(), built, layers=LAYERS, loss_fn=loss_fn, transport="threads") as pipe,
            pytest.raises(pl.PipeloomError, match="random generator between its layers, and stages that are threads"),
        ):
            pipe.step(x, x)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: torch.rand(())])
def test_what_later_stages_read_depends_on_what_is_drawn(draw):
    class Sometimes(Net):
        def forward(self, x):
            first = self.first(x)
            chosen = draw() < 0.3
            y = self.through(first)
            return self.last(y + first if chosen else y), torch.full((len(x),), bool(chosen))

    seen = []

    def loss_fn(output, targets):
        value, chosen = output
        seen.append(bool(chosen[0]))
        return F.mse_loss(value, (2.0 if chosen[0] else 1.0) * targets)

    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    x = torch.randn(8, 4)
    with pipeline(Sometimes(), loss_fn=loss_fn) as pipe:  # its layers begin as the identity
        losses = [float(pipe.step(x, x)) for _ in range(4)]
    assert (losses, len(set(seen))) == ([0] * 4, 2)


@pytest.mark.parametrize(
    ("compare", "varies"),
    [
        (lambda drawn: drawn < 1, False),
        (lambda drawn: torch.lt(drawn, other=0.1), True),
        (lambda drawn: drawn.mul_(10) < 1, True),
        (lambda drawn: operator.imul(drawn, 10) < 1, True),
    ],
)
def test_a_comparison_of_what_is_drawn_is_certain_only_where_no_draw_changes_it(compare, varies):
    with Origins() as origins:
        drawn = torch.rand(())
        origins.mark(drawn, DRAWN | IN_UNIT)
        bool(compare(drawn))
    assert bool(origins.decided & DRAWN) is varies


def test_a_forward_that_is_left_without_gradients_leaves_them_on():
    class Frozen(Net):
        def forward(self, x):
            first = self.first(x)
            torch.set_grad_enabled(False)
            y = self.through(first)
            torch.set_grad_enabled(True)
            return self.last(y + first)

    model, x = Frozen(), torch.randn(8, 4)
    for block in model.blocks:
        block.requires_grad_(False)
    with pipeline(model, ranks=2, schedule="1f1b") as pipe:
        loss = pipe.step({"x": x}, x)
        assert torch.is_grad_enabled()
        gradients = {name: each.grad for name, each in pipe.named_parameters() if each.requires_grad}
    plain = copy.deepcopy(model)
    plain.zero_grad()
    expected = F.mse_loss(plain(x), x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_buffers_change_once_per_microbatch():
    class Counts(Net):
        def forward(self, x):
            y = self.through(self.first(x))
            self.seen.lerp_(y.detach().mean(0), 0.5)
            return self.last(y)

    model, x = Counts(), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    with pipeline(model) as pipe:
        pipe.step(x, x)
    for part in x.chunk(4):
        plain(part)
    torch.testing.assert_close(model.seen, plain.seen)


def test_penalties_of_weights_of_other_stages():
    class Penalty(Net):
        def forward(self, x):
            return self.last(self.through(self.first(x))) * sum(block.weight.square().sum() for block in self.blocks)

    model, x = Penalty(), torch.randn(8, 4)
    with pipeline(model) as pipe:
        for _ in range(2):
            assert compared(model, {"x": x}, x, pipe) < 1e-9


def test_a_forward_that_reads_all_parameters_is_refused():
    class Decay(Net):
        def forward(self, x):
            assert next(self.parameters()).dtype is torch.float64  # the first one tells the dtype
            return self.last(self.through(self.first(x))) + sum(p.square().sum() for p in self.parameters())

    x = torch.randn(8, 4)
    with pipeline(Decay(), ranks=2) as pipe, pytest.raises(pl.PipeloomError, match="reads all its parameters"):
        pipe.step(x, x)


def test_sizes_among_arguments_of_layers():
    """A torch.Size is a tuple that takes its items in one argument."""

    class Sized(nn.Linear):
        def forward(self, x, scale, size):
            return super().forward(x).reshape(size) * scale

    class Sizes(Net):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Sized(4, 4) for _ in range(3))

        def forward(self, x):
            y = scale = self.first(x)
            for block in self.blocks:
                y = block(y, scale, x.shape)
            return self.last(y)

    x = torch.randn(8, 4)
    model = Sizes()
    with pipeline(model) as pipe:
        assert compared(model, {"x": x}, x, pipe) < 1e-9


def test_a_dropout_of_another_stage_draws_nothing():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0))
    value = torch.arange(8).reshape(2, 4)
    for stage in split(model, 3).modules[:2]:
        value = stage(value)
    assert "seed" not in value  # which would make every stage follow all of torch's functions
