"""What stages do not send each other: weights of later layers, gradients through layers, and types of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import grad

import pipeloom as pl
from tests.cpu.test_planned_values import Net, compared, float64, pipeline

__all__ = ["float64"]


class Runs(Net):
    """Runs a function of itself and its input."""

    def __init__(self, run):
        super().__init__()
        torch.manual_seed(0)
        self.run, self.last = run, getattr(run, "last", nn.Linear)(4, 4)
        self.blocks = nn.ModuleList(getattr(run, "block", nn.Linear)(4, 4) for _ in range(3))
        if run is shared_ahead:
            self.shared = self.last.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    @staticmethod
    def pick(given):
        return list(given.values() if isinstance(given, dict) else given)[1]

    def forward(self, x):
        return self.run(self, x)


def ahead(model, x):
    x = model.blocks[1](model.blocks[0](model.first(x)))
    return model.last(model.blocks[2](x * model.last.weight.mean()))


def shared_ahead(model, x):
    x = model.blocks[1](model.blocks[0](model.first(x)))
    return model.last(model.blocks[2](x * model.shared.mean()))


def branch_ahead(model, x):
    x = model.first(x)
    if model.last.weight.mean() > 1e9:
        x = -x
    return model.last(model.through(x))


def own_weight(model, x):
    first = model.first(x)
    return model.through(first) + model.last(first * model.last.weight.mean())


def gradient_of_the_last_layers(model, x):
    x = model.through(model.first(x))
    y = model.last(x)
    return y + grad(y.sin().sum(), x, create_graph=True)[0]


def gradient_of_the_first_layers(model, x):
    first = model.first(x)
    x = model.blocks[0](first)
    x = x + grad(x.sin().sum(), first, create_graph=True)[0]
    return model.last(model.blocks[2](model.blocks[1](x)))


def forces(model, x):
    x.requires_grad_()
    energies = model.last(model.through(model.first(x))).sin() + x.square()
    return energies + grad(energies.sum(), x, create_graph=True)[0]


def gradient_past_layers(model, x):
    first = model.first(x)
    y = model.last(model.through(first).sin() + first)
    return y + grad(y.sin().sum(), first, create_graph=True)[0]


def unlike_layers(model, x):
    for layer in (model.first, *model.blocks, model.last):
        x = layer(x) * (2 if type(layer) is nn.Linear else 3)
    return x


def unlike_mapped_layers(model, x):
    layers = [model.first, *model.blocks, model.last]
    for layer, kind in zip(layers, map(type, layers), strict=True):
        x = layer(x) * (2 if kind is nn.Linear else 3)
    return x


class Sums(nn.Linear):
    """Adds what is in its arguments."""

    def forward(self, given):
        if isinstance(given, Pair):
            given = vars(given)
        return super().forward(sum(given.values() if isinstance(given, dict) else given))


@dataclass
class Pair:
    one: torch.Tensor
    other: torch.Tensor


def several_in_one_argument(kind):
    def run(model, x):
        first = model.first(x)
        y = model.through(first)
        given = kind(y, first.sin())
        return model.last(given) + (0 if kind is Pair else model.pick(given))

    run.last = Sums
    return run


def listed(*values):
    return [*values]


def named(*values):
    return dict(zip(("y", "first"), values, strict=True))


class State(NamedTuple):
    value: torch.Tensor
    more: torch.Tensor


class Step(nn.Linear):
    def forward(self, given):
        value = super().forward(given.value if isinstance(given, State) else given).tanh()
        return State(value, value.sin())


def named_tuples(model, x):
    x = model.through(model.first(x))
    return model.last(x.value + x.more)


named_tuples.block = Step


def typed_values(model, x):
    x = model.through(model.first(x))
    if type(x) is not torch.Tensor or not isinstance(model.last, nn.Linear) or model.last.__class__ is not nn.Linear:
        raise TypeError(f"{type(model.last)} of {type(x)}")
    return model.last(x)


RIGHT = [
    several_in_one_argument(listed),
    several_in_one_argument(named),
    own_weight,
    shared_ahead,
    gradient_of_the_last_layers,
    gradient_of_the_first_layers,
    named_tuples,
    typed_values,
]


@pytest.mark.parametrize("run", RIGHT)
@pytest.mark.parametrize("ranks", [2, 5])
def test_what_one_stage_computes(run, ranks):
    x, model = torch.randn(8, 4), Runs(run)
    with pipeline(model, ranks) as pipe:
        for _ in range(2):
            assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-9
            for parameter in pipe.parameters():
                parameter.grad = None


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (ahead, r"computes argument '0' of 'blocks.2' with 'last.weight' of a later layer: .*self.shared = self.last"),
        (branch_ahead, r"branches between its layers on 'last.weight' of a later layer: "),
        (forces, r"computes its result with torch.autograd.grad through layers of other stages: .* one layer"),
        (gradient_past_layers, r"computes its result with torch.autograd.grad through layers of other stages"),
        (several_in_one_argument(Pair), r"'last' reads argument '0', which combines what several earlier stages"),
        (unlike_mapped_layers, r"asks for map\(type, layers\) in test_planned_absent.py, line \d+: .* isinstance"),
        (unlike_layers, r"asks for type\(layer\) in test_planned_absent.py, line \d+: .* isinstance"),
    ],
)
def test_what_stages_do_not_send_is_refused(run, said):
    x, model = torch.randn(8, 4), Runs(run)
    with pipeline(model, ranks=5) as pipe, pytest.raises(pl.PipeloomError, match=said) as raised:
        pipe.step(x, x)
    assert "\n" not in str(raised.value)
