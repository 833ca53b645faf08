"""Nothing silently trains another function: forwards that are no chain, hooks, modules that run twice, skips."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, SplitError, StageError
from pipeloom.models import GPT, GPTConfig


class Residual(nn.Module):
    """x + b(a(x)): no chain."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class Declared(Residual):
    pipeline_layers = ("a", "b")

    def forward(self, x):
        return self.b(self.a(x))


class Redefined(Declared):
    def forward(self, x):
        return 3 * self.b(self.act(self.a(x)))


class Twice(Residual):
    def forward(self, x):
        h = self.a(x)
        return self.b(h) + self.a(h)


class Skip(nn.Module):
    """The result of a is read behind c, two stages later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h)) + h


class Options(Residual):
    def forward(self, x, *, scale=None, sign=1.0):
        value = super().forward(x) * sign
        return {"value": value if scale is None else value * scale[:, None]}


def equal_steps(model: nn.Module, inputs=None, loss_fn=F.mse_loss, **options) -> None:
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    inputs = x if inputs is None else inputs
    expected = loss_fn(model(**inputs) if isinstance(inputs, dict) else model(inputs), y)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, **options) as pipe:
        torch.testing.assert_close(pipe.step(inputs, y), expected.detach())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name])


def test_layers_run_inside_the_models_own_forward():
    equal_steps(Residual(), layers=["a", "b"])
    equal_steps(Redefined())
    x = torch.randn(4, 4)
    arguments = {"x": x, "scale": torch.arange(4.0), "sign": -1.0}
    equal_steps(Options(), arguments, lambda output, y: F.mse_loss(output["value"], y), layers=["a", "b"])


def test_hooks_and_replaced_forwards_run():
    for model in (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), Declared()):
        model.register_forward_hook(lambda module, inputs, output: 2 * output)
        model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        equal_steps(model)
    model = Residual()
    model.forward = types.MethodType(lambda self, x: self.b(self.a(x)) - x, model)
    equal_steps(model, layers=["a", "b"])


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (Twice(), {"layers": ["a", "b"]}, r"runs 'a' twice or in another order than layers"),
        (Residual(), {"layers": ["b", "a"]}, r"runs 'b' twice or in another order"),
        (Skip(), {"layers": ["a", "b", "c"], "cut": [2, 1]}, r"reads what earlier stages computed"),
    ],
)
def test_what_stages_cannot_run_is_refused(model, options, said):
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, **options) as pipe:
        with pytest.raises((SplitError, StageError), match=said) as error:
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        assert "\n" not in str(error.value)


def test_a_forward_that_calls_another_model_is_refused():
    model = Residual()
    other = model.forward
    model.forward = lambda x: other(x) * 1
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with (
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, layers=["a", "b"]) as pipe,
        pytest.raises(StageError, match="ended without calling 'a'"),
    ):
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))


def test_slices_refuse_changed_models():
    model = GPT(GPTConfig(vocabulary_size=8, layers=2, width=8, heads=2, sequence_length=4))
    model.register_forward_hook(lambda module, inputs, output: output)
    schedule = pl.schedules.build("terapipe", num_ranks=2, num_microbatches=2, num_slices=2)
    with pytest.raises(SplitError, match="has forward hooks, which stages for parts of sequences do not run"):
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss)


class Misdeclared(Residual):
    """Its pipeline_layers leave out what happens between them."""

    pipeline_layers = ("a", "b")

    def forward(self, x):
        return self.b(self.act(self.a(x)))


def test_check_compares_with_the_model():
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    model = Misdeclared()
    model.act = nn.Tanh()
    with (
        pytest.warns(UserWarning, match="will not run"),
        pytest.raises(InputError, match=r"check: the pipeline computes another result .* layer that differs is 'b'"),
    ):
        pl.Pipeline(model, schedule, loss_fn=F.mse_loss, check=x)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, check=(x, y)) as pipe:
        assert all(module.training for module in pipe.modules())
    assert model.training
    with pytest.raises(InputError, match="the model is given in parts"):
        pl.Pipeline(list(model)[:2], schedule, check=x)


def test_check_tells_a_mean_of_means():
    x, y = torch.randn(4, 4), torch.tensor([0, -100, -100, 3])
    y[1] = 1
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="loss_fn is a mean over the labels of a micro-batch"):
        pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, check=(x, y)).close()
