"""Changes around a model's layers after it was cut, and parameters over one memory, are told before a step."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from tests.cpu.test_planned_values import LAYERS, Net

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


class Chain(Net):
    def forward(self, x):
        return self.last(self.through(self.first(x)))


def pipeline(model, **options):
    built = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    options = options if isinstance(model, nn.Sequential) else {"layers": LAYERS, **options}
    return pl.Pipeline(model, built, loss_fn=F.mse_loss, **options)


@pytest.mark.parametrize("run", ["step", "evaluate", "forward"])
def test_a_forward_that_is_replaced_after_the_cut_is_told(run):
    model = Chain()
    with pipeline(model) as pipe:
        pipe.step(X, X)
        model.forward = types.MethodType(lambda self, x: 2 * Chain.forward(self, x), model)
        for _ in range(2):
            with pytest.raises(pl.PipeloomError, match=r"^Chain has another forward than when the model was cut"):
                getattr(pipe, run)(*((X,) if run == "forward" else (X, X)))
        del model.forward
        pipe.step(X, X)  # nothing was sent
    with pipeline(Chain()) as pipe:
        model.blocks[0].forward = lambda x: x  # of another model
        pipe.step(X, X)


def test_hooks_around_a_chain_are_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    with pipeline(model) as pipe:
        pipe.step(X, X)
        model[0].register_forward_hook(lambda module, inputs, output: 2 * output)  # of a layer
        pipe.step(X, X)
        handle = model.register_forward_hook(lambda module, inputs, output: 2 * output)
        with pytest.raises(pl.PipeloomError, match=r"^Sequential has other forward hooks than"):
            pipe.step(X, X)
        handle.remove()
        pipe.step(X, X)


@pytest.mark.parametrize(
    ("home", "name"), [("config", "config.encoder_layerdrop"), ("blocks", "blocks.layerdrop")], ids=["config", "module"]
)
def test_layerdrop_is_refused_in_training(home, name):
    model = Chain()
    model.config = types.SimpleNamespace(encoder_layerdrop=0.0)
    setattr(getattr(model, home), name.rpartition(".")[2], 0.0)
    with pipeline(model) as pipe:
        pipe.step(X, X)
        setattr(getattr(model, home), name.rpartition(".")[2], 0.1)
        with pytest.raises(pl.PipeloomError, match=rf"^{name}=0.1: Chain drops whole layers .* Set it to 0"):
            pipe.step(X, X)
        pipe.evaluate(X, X)
        pipe.eval().step(X, X)


def test_parameters_over_one_memory():
    def model():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))

    flat = torch.randn(32)
    apart, together, shared = model(), model(), model()
    for index, part in enumerate(flat.split(16)):
        apart[3 * index].weight = nn.Parameter(part.view(4, 4))
    together[3].weight = nn.Parameter(together[2].weight.data)
    for each in (apart, together):
        with pipeline(each) as pipe:
            pipe.step(X, X)
    shared[3].weight = nn.Parameter(shared[0].weight.data.T)
    with pytest.raises(
        pl.PipeloomError, match=r"^'0.weight' and '3.weight' are two parameters .* stages 0 and 1: .*tied"
    ):
        pipeline(shared)


def test_a_check_takes_outputs_with_scalars():
    class Scalars(Net):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            y = self.through(self.first(x))
            return self.last(y), y.square().mean(), self.number

    for number in (3, 0.5):
        model = Scalars(number)
        options = {"loss_fn": lambda output, y: F.mse_loss(output[0], y) + 0.1 * output[1] * output[2]}
        built = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
        with pl.Pipeline(model, built, layers=LAYERS, check=(X, X), **options) as pipe:
            output = model(X)
            torch.testing.assert_close(pipe.step(X, X), options["loss_fn"](output, X).detach())
