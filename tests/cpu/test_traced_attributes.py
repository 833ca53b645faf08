"""Traced models whose forward changes attributes or buffers: the same function is trained, or they are refused."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.split import split


class _Two(nn.Module):
    """Two layers; subclasses define what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls, self.last, self.seen = 0, torch.zeros(()), [1]
        self.state, self.config = SimpleNamespace(step=0), {"scale": [2.0]}
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.between(self.a(x)))) * self.config["scale"][0] + 0 * self.count

    def between(self, h: Tensor) -> Tensor:
        return h


class _Counts(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.calls += 1
        return h * self.calls


class _Caches(_Two):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(self, "ones"):
            self.ones = torch.ones(h.shape[1])
        return h * self.ones


class _Appends(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.seen.append(h)
        return h


class _InObject(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.state.step += 1
        return h


class _ChangesInPlace(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.last += 1
        return h


class _LeavesALoss(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.loss = h.square().mean()
        return h


class _Keeps(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.last = h.relu()
        return self.last


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_Counts, "'calls' and may read it in the next call: .*register_buffer.* layers="),
        (_Caches, "'ones' and may read it"),
        (_Appends, "'seen' and may read it"),
        (_InObject, "'state' and may read it"),
        (_ChangesInPlace, "the tensor 'last' in place"),
        (_LeavesALoss, "'loss' to a number with a gradient.*auxiliary_loss"),
    ],
)
def test_what_calls_leave_for_later_ones(kind: type[_Two], message: str) -> None:
    model = kind()
    before = dict(vars(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SplitError, match=message) as caught:
            split(nn.ModuleDict({"inner": model})["inner"], 2, example=torch.randn(2, 4))
    assert "\n" not in str(caught.value)
    assert vars(model).keys() == before.keys()
    assert model.calls == 0
    assert model.seen == [1]


def test_what_is_only_set_is_told() -> None:
    model = _Keeps()
    last, config = model.last, model.config
    with pytest.warns(UserWarning, match="sets the attribute 'last', and stages of a traced model set no"):
        split(model, 2, example=torch.randn(2, 4))
    assert model.last is last
    assert model.config is config


class _AddsInPlace(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.count += 1
        return h * self.count


class _Assigns(_Two):
    def between(self, h: Tensor) -> Tensor:
        y = h * (1 + self.count)
        self.count = 0.5 * self.count + h.detach().mean()
        return y


class _ChangesARow(_Two):
    def between(self, h: Tensor) -> Tensor:
        self.table[0].add_(h.detach().mean(0))
        return h + self.table[0]


class _ReturnsItLater(_AddsInPlace):
    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.b(torch.tanh(self.a(x))) * self.count


@pytest.mark.parametrize("kind", [_AddsInPlace, _Assigns, _ChangesARow, _ReturnsItLater])
def test_buffers_that_change_with_every_micro_batch(kind: type[_Two]) -> None:
    """With gpipe all forwards run before the first backward, and before the second stage."""
    torch.manual_seed(0)
    model: Any = kind().double()
    plain, x = copy.deepcopy(model), torch.randn(4, 4, dtype=torch.float64)
    schedule = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, example=x[:2], cut=["b"]) as pipe:
        for _ in range(2):
            total = torch.zeros((), dtype=torch.float64)
            for piece in x.split(2):
                loss = F.mse_loss(plain(piece), piece) / 2
                loss.backward()
                total += loss.detach()
            assert abs(pipe.step(x, x) - total) < 1e-12
        found = dict(pipe.named_parameters())
        for name, parameter in plain.named_parameters():
            assert torch.allclose(found[name].grad, parameter.grad, rtol=0, atol=1e-12), name
        assert torch.equal(pipe.state_dict()["count"], plain.count)
        assert torch.equal(pipe.state_dict()["table"], plain.table)


def test_recurrent_layers_set_views_of_their_parameters() -> None:
    class Recurrent(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = nn.GRU(4, 4, batch_first=True)

        def between(self, h: Tensor) -> Tensor:
            return self.recurrent(h)[0]

    x = torch.randn(2, 3, 4)
    model = Recurrent()
    first, second = split(model, 2, example=x, cut=["b"]).modules
    assert torch.allclose(second(first(x)), model(x))
