"""What a model's forward reads and calls of layers on other stages: weights, attributes, methods, modules inside."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import pipeloom as pl
from tests.cpu.test_planned_values import Net, compared, float64, pipeline

__all__ = ["float64"]


class Layer(nn.Module):
    """Keeps values of its last forward, and has a method that reads its weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.factor, self.losses = nn.Linear(4, 4), 1.0, []
        self.register_buffer("offset", torch.full((4,), 0.3))

    def scaled(self, x):
        return x * self.inner.weight.sum() + self.inner.bias

    def forward(self, x):
        y = self.inner(x).tanh() * self.factor
        self.mean, self.losses = y.mean(), [y.square().mean()]
        return y


class Reads(Net):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Layer() for _ in range(3))
        self.pair, self.act, self.read = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sigmoid(), read

    def forget(self):
        for block in self.blocks:
            block.losses = []
            vars(block).pop("mean", None)

    def forward(self, x):
        first = self.first(x)
        return self.read(self, first, self.last(self.pair(self.through(first))))


def attributes_of_the_last_forward(model, first, x):
    return x * sum(block.mean for block in model.blocks if hasattr(block, "mean")) + sum(model.blocks[0].losses)


def weights_by_several_ways(model, first, x):
    block, last = model.blocks[0], model.blocks[2]
    penalty = sum(p.square().sum() for p in block.parameters()) + sum(p.sum() for p in last.inner.parameters())
    linear = [part for part in block.modules() if isinstance(part, nn.Linear)]
    named = model.get_parameter("blocks.1.inner.bias") * model.pair[0].bias + len(model.pair)
    return x * penalty + linear[0].weight.sum() + sum(part.bias for part in block.children()) + named


READS = [
    lambda model, first, x: x + model.blocks[0].inner.weight.sum() * model.blocks[1].offset,
    lambda model, first, x: F.linear(x, model.blocks[0].inner.weight, model.pair[0].bias),
    lambda model, first, x: model.blocks[0].scaled(x) + model.blocks[0].scaled(first),
    lambda model, first, x: x + model.blocks[0].inner(first) * model.blocks[0].inner(first + 1),
    lambda model, first, x: model.act(first) + model.act(x),  # each call has a result of its own
    lambda model, first, x: x * sum(2 for block in model.blocks if isinstance(block, Layer)),
    attributes_of_the_last_forward,
    weights_by_several_ways,
]


@pytest.mark.parametrize("read", READS)
def test_a_forward_reads_layers_of_other_stages(read):
    x = torch.randn(8, 4)
    for ranks, schedule in ((2, "1f1b"), (6, "gpipe")):
        model = Reads(read)
        built = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=4)
        layers = ["first", "blocks.*", "pair", "last"]
        with pl.Pipeline(model, built, layers=layers, loss_fn=F.mse_loss) as pipe:
            for _ in range(2):
                model.forget()  # graphs are not copied
                assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12
                for parameter in pipe.parameters():
                    parameter.grad = None


class Sets(Reads):
    """Sets attributes of layers in its forward."""

    def forward(self, x):
        x = self.first(x)
        value = self.read(self, x)
        for index, block in enumerate(self.blocks):
            block.factor = index + value
            x = block(x)
        return self.last(self.pair(x))


class CallsInside(Reads):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block.inner(x)
        return self.last(self.pair(x))


class Replaces(Reads):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = functional_call(block, {"inner.weight": 2 * block.inner.weight}, (x,))
        return self.last(self.pair(x))


class Given(nn.Linear):
    def forward(self, x, other):
        return super().forward(x) @ other.weight


class GivesModule(Reads):
    """Its last layer reads a module of the first stage, which is its argument."""

    def __init__(self, read):
        super().__init__(read)
        self.last = Given(4, 4)

    def forward(self, x):
        return self.last(self.pair(self.through(self.first(x))), self.first)


def test_a_forward_sets_attributes_of_layers():
    x = torch.randn(8, 4)
    model = Sets(lambda model, x: len(x))
    built = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=4)
    with pl.Pipeline(model, built, layers=["first", "blocks.*", "pair", "last"], loss_fn=F.mse_loss) as pipe:
        assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Sets(lambda model, x: x.mean()), r"sets 'blocks.\d.factor' to what earlier stages compute: .*argument"),
        (CallsInside(None), r"calls 'blocks.0.inner', inside of the layer 'blocks.0', itself: .* layers="),
        (GivesModule(None), r"'last' reads 'first.weight' of another stage, through a module among its arguments"),
        (Replaces(None), r"replaces the parameter 'blocks.0.inner.weight', as torch.func.functional_call does"),
    ],
)
def test_what_layers_of_other_stages_do_not_allow(model, message):
    x = torch.randn(8, 4).float()
    built = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=4)
    pipe = pl.Pipeline(model, built, layers=["first", "blocks.*", "pair", "last"], loss_fn=F.mse_loss)
    with pipe, pytest.raises(pl.PipeloomError, match=message) as raised:
        pipe.step(x, x)
    assert "\n" not in str(raised.value)


class ByValues(nn.Linear):
    """The shape of what it computes follows from its input, and without weights it does not compute."""

    needs_weights, wraps = False, False

    def forward(self, x):
        if self.needs_weights and not self.weight.any():
            raise ValueError("no weights")
        found = super().forward(x) + x.new_ones(int((x == x).sum()) // x.numel())
        return SimpleNamespace(value=found) if self.wraps else found


class Unwraps(nn.Linear):
    def forward(self, x):
        return super().forward(getattr(x, "value", x))


def test_layers_whose_shapes_follow_from_values():
    x, model = torch.randn(8, 4), Reads(lambda model, first, x: x + first)
    model.blocks[0] = ByValues(4, 4)
    built = pl.schedules.build("gpipe", num_ranks=6, num_microbatches=4)
    layers = ["first", "blocks.*", "pair", "last"]
    with pl.Pipeline(model, built, layers=layers, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, x)
        model.zero_grad(), model.forget()
        assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12
        model.blocks[0].needs_weights = True  # the stage that runs it sends the shape
        model.zero_grad(), model.forget()
        assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12
    model.blocks[0].wraps, model.blocks[1] = True, Unwraps(4, 4)  # what cannot be sent
    built = pl.schedules.build("gpipe", num_ranks=2, num_microbatches=4)
    pipe = pl.Pipeline(model, built, layers=layers, loss_fn=F.mse_loss, cut=[3, 3])
    said = r"a ByValues of another stage returns is not known without values: .* in one stage"
    with pipe, pytest.raises(pl.PipeloomError, match=said) as raised:
        pipe.step(x, x)
    assert "\n" not in str(raised.value)


class Skipping(Net):
    """Passes over a layer on one of two stages alone, where the forward was explored before."""

    skipped: tuple[int, int] | None = None

    def forward(self, x):
        x, stage = self.first(x), int(len(vars(self.last)["_link"]) == 4)
        for index, block in enumerate(self.blocks):
            if (stage, index) != Skipping.skipped:
                x = block(x)
        return self.last(x)


@pytest.mark.parametrize("skipped", [(0, 0), (0, 1), (1, 1), (1, 2)])
def test_no_stage_goes_on_where_its_forward_passes_over_a_layer(skipped, monkeypatch):
    x = torch.randn(8, 4)
    with pipeline(Skipping(), ranks=2, schedule="gpipe") as pipe:
        pipe.step(x, x)
        monkeypatch.setattr(Skipping, "skipped", skipped)
        with pytest.raises(pl.PipeloomError, match=r"without calling 'blocks|in another order"):
            pipe.step(x, x)


class Pooled(Net):
    def forward(self, x):
        return self.last(self.pool(self.through(self.first(x))[:, 0, :]))

    def __init__(self):
        super().__init__()
        self.pool = nn.Linear(4, 4)


def test_a_head_alone_behind_a_pooler():
    pl.register_layout(Pooled, ["first", "blocks.*", "pool", "last"])
    x, model = torch.randn(8, 3, 4), Pooled()
    built = pl.schedules.build("gpipe", num_ranks=6, num_microbatches=4)
    with pl.Pipeline(model, built, loss_fn=F.mse_loss) as pipe:
        for _ in range(2):
            assert compared(model, {"x": x}, x[:, 1], pipe) < 1e-12
            for parameter in pipe.parameters():
                parameter.grad = None


def test_a_stage_without_parameters_there_tells_the_dtype():
    class Casts(Net):
        def forward(self, x):
            return self.last(self.through(self.first(x.to(next(self.blocks.parameters()).dtype))))

    x, model = torch.randn(8, 4), Casts()
    with pipeline(model, ranks=5, schedule="gpipe") as pipe:
        assert compared(model, {"x": x}, x, pipe) < 1e-12
