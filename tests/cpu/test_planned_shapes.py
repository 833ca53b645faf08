"""Forwards that read the shapes of what earlier layers returned, or whose layers change shapes: as the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.split.planned.tracking.forms import ResultForms, encoded, zeros_of

LAYERS = ["first", *(f"{name}.{i}" for name in ("down", "up") for i in range(3)), "last"]
STARRED = ["first", "down.*", "up.*", "last"]


@pytest.fixture(autouse=True)
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


class Hourglass(nn.Module):
    """Convolutions that halve the length, and as many at growing lengths; subclasses say how it grows."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(2, 4, 1), nn.Conv1d(4, 2, 1)
        self.down = nn.ModuleList(nn.Conv1d(4, 4, 3, 2, 1) for _ in range(3))
        self.up = nn.ModuleList(nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x):
        h, found = self.first(x), []
        for layer in self.down:
            found.append(h)
            h = torch.tanh(layer(h))
        for layer in self.up:
            h = layer(self.grown(h, found.pop()))
        return self.last(h)


class Sizes(Hourglass):
    """Reads the shapes of earlier results alone."""

    def grown(self, h, earlier):
        return F.interpolate(h, size=earlier.shape[2:], mode="linear") * earlier.shape[2] / 8


class Sums(Hourglass):
    """Reads their values too."""

    def grown(self, h, earlier):
        return F.interpolate(h, size=earlier.shape[2:]) + earlier


class Counts(Hourglass):
    """Divides by a number that adds up over all earlier results."""

    def forward(self, x):
        h, total = self.first(x), 0
        for layer in self.down:
            h = torch.tanh(layer(h))
            total += h.shape[2]
        for layer in self.up:
            h = layer(h) / total * 8
        return F.interpolate(self.last(h), size=x.shape[2:])


class Joined(Hourglass):
    """A U-Net of layers with two inputs, as in diffusion models: later layers take other numbers of channels."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 4)
        self.up = nn.ModuleList(Conditioned(channels) for channels in (8, 8, 8))

    def forward(self, x):
        time, h, found = self.time(x.mean((1, 2))[:, None]), self.first(x), []
        for layer in self.down:
            found.append(h)
            h = torch.tanh(layer(h))
        for layer in self.up:
            h = F.interpolate(h, scale_factor=2.0)
            h = layer(torch.cat((h, found.pop()), 1), time)
        return self.last(h)


class Conditioned(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(2, channels), nn.Conv1d(channels, 4, 3, padding=1)

    def forward(self, x, time):
        return self.conv(self.norm(x)) + time[:, :, None]


@pytest.mark.parametrize("kind", [Sizes, Sums, Counts, Joined])
def test_shapes_of_earlier_results(kind):
    torch.manual_seed(0)
    x = torch.randn(8, 2, 24)
    model = kind()
    whole = copy.deepcopy(model)
    expected = F.mse_loss(whole(x), x)
    expected.backward()
    first = ["time"] if kind is Joined else []
    cuts = [[3 + len(first), 5], [6 + len(first), 2], [2 + len(first), 5, 1], [3 + len(first), 3, 2]]
    ways = [(first + LAYERS, cut) for cut in cuts] + [(first + STARRED, "layers"), (first + STARRED, [4, 2])]
    for layers, cut in ways:
        ranks = 2 if cut == "layers" else len(cut)
        schedule = pl.schedules.build("1f1b", num_ranks=ranks, num_microbatches=3)
        same = copy.deepcopy(model)
        with pl.Pipeline(same, schedule, loss_fn=F.mse_loss, layers=layers, cut=cut) as pipe:
            for _ in range(2):  # the first step finds what stages exchange, the second one knows it
                same.zero_grad()
                loss = pipe.step(x, x)
                gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
        assert float(loss) == pytest.approx(float(expected), abs=1e-12), (layers, cut)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12, msg=f"{name} {cut}")


def test_forms_are_sent_where_results_are_unlike_the_last_one():
    x, y = torch.zeros(2, 3), torch.zeros(2, 5, dtype=torch.float32)
    forms = ResultForms({})
    forms.add("a", (y, 3))
    forms.add("b", x)
    forms.add("c", object())
    forms.add("d", x)
    assert forms.unlike == ["a", "c"]
    arrived = ResultForms({"value": x, "forms": forms.text([], x)})
    assert arrived.arrived == {"a": encoded((y, 3)), "c": None}
    found = zeros_of(arrived.arrived["a"], None)
    assert (found[0].shape, found[0].dtype, found[1]) == (y.shape, y.dtype, 3)
    names = ["a", "b", "c", "d"]
    arrived.add("e", x)
    assert arrived.text(names, x) == forms.text([], x)  # nothing to add
    other = ResultForms({"value": x, "forms": forms.text([], x)})
    other.add("e", y)
    sent = ResultForms({"value": y, "forms": other.text(names, y)}).arrived
    assert sent == {"a": encoded((y, 3)), "b": encoded(x), "c": None, "d": encoded(x)}


@pytest.mark.parametrize("value", [{"a": [torch.ones(2), None, 1.5, True, "x"]}, (torch.ones(0, dtype=torch.int8),)])
def test_zeros_have_the_form_that_was_sent(value):
    found = zeros_of(encoded(value), None)
    assert encoded(found) == encoded(value)
    assert not any(leaf.any() for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor))
