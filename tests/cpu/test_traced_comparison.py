"""A trace that would be another function than the model's forward is refused: draws, handled errors, other results."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import sys

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import SplitError
from pipeloom.split import split


class _Two(nn.Module):
    """Two layers; subclasses define what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.known = {"one": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(torch.tanh(self.a(x))))

    def between(self, h: Tensor) -> Tensor:
        return h


class _DrawsInPython(_Two):
    def between(self, h: Tensor) -> Tensor:
        return h * random.uniform(0.5, 1.5)


class _DrawsInNumpy(_Two):
    def between(self, h: Tensor) -> Tensor:
        keeps = np.random.rand() < 0.5
        return h if keeps else -h


class _Falls(_Two):
    """In a trace the condition raises an error. What the example takes is the same: only the trace shows it."""

    def between(self, h: Tensor) -> Tensor:
        try:
            return 2 * h if h.abs().max() > 100 else h
        except Exception:
            return h


class _Suppresses(_Two):
    def between(self, h: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            h = h * float(h.detach().numpy().mean() > 100)
        return h


class _Private(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = random.Random(0)

    def between(self, h: Tensor) -> Tensor:
        return h * self.numbers.random()


class _InInferenceMode(_Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            h = self.a(x)
        return self.b(x + h.clone())


class _Lists(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight]

    def between(self, h: Tensor) -> Tensor:
        return h @ self.weights[0]


class _Asks(_Two):
    def between(self, h: Tensor) -> Tensor:
        return h if torch.compiler.is_exporting() else -h


class _BranchesOutsideOfTraces(_Two):
    """The example takes the branch that the trace has; other values do not."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.sum() < 0:
            return super().forward(x) * 2
        return super().forward(x)


class _Scaled(torch.autograd.Function):
    """Twice the values, and a gradient that is `factor` times the right one."""

    @staticmethod
    def forward(ctx, h: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return 2 * h

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return 2 * ctx.factor * gradient, None


class _ReversesGradients(_Two):
    def between(self, h: Tensor) -> Tensor:
        return _Scaled.apply(h, -1.0)


class _HooksTensors(_Two):
    def between(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: 3 * gradient)
        return h


class _HooksModules(_Two):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (_DrawsInPython, r"draws from random at .*comparison.py:\d+, 'return h \* random.uniform.*torch.rand"),
        (_DrawsInNumpy, r"draws from numpy.random at .*comparison.py:\d+, 'keeps = np.random"),
        (_Falls, r"handles an error at .*comparison.py:\d+, 'return 2 \* h if .*Could not guard.* layers="),
        (_Suppresses, r"handles an error at .*comparison.py:\d+, 'h = h \* float.*numpy"),
        (_Private, "the trace of _Private computes another result"),
        (_Asks, "the trace of _Asks computes another result"),
        (_BranchesOutsideOfTraces, "the trace of _BranchesOutsideOfTraces computes another result"),
        (_ReversesGradients, "computes other gradients than its forward: the backward of _Scaled is lost"),
        (_HooksTensors, "computes other gradients than its forward: a hook of a tensor is lost"),
        (_HooksModules, "computes other gradients than its forward: a backward hook of a module is lost"),
        (_InInferenceMode, "computes other gradients than its forward: torch.inference_mode is lost"),
        (_Lists, "reads the parameter 'a.weight' in another way than from its module"),
    ],
)
def test_another_function(kind: type[_Two], message: str) -> None:
    model = kind()
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    with pytest.raises(SplitError, match=message) as caught:
        split(model, 2, example=torch.ones(2, 4), cut="parameters")
    assert "\n" not in str(caught.value)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()) == before


def test_a_function_with_the_gradients_of_its_operations() -> None:
    class Doubles(_Two):
        def between(self, h: Tensor) -> Tensor:
            return _Scaled.apply(h, 1.0)

    assert len(split(Doubles(), 2, example=torch.ones(2, 4), cut="parameters").modules) == 2


@pytest.mark.parametrize("cut", ["parameters", ["b"]])
def test_no_stage_begins_inside_of_vmap(cut: str | list[str]) -> None:
    class Maps(_Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.vmap(lambda row: torch.tanh(self.a(row)) * row)(x))

    model = Maps()
    plain, x = copy.deepcopy(model), torch.randn(4, 4)
    for part in x.chunk(2):
        (nn.functional.mse_loss(plain(part), part) / 2).backward()
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, example=x[:2], cut=cut) as pipe:
        pipe.step(x, x)
        gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_a_buffer_that_changes_without_gradients_and_is_read_by_a_later_stage() -> None:
    class Centers(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.no_grad():
                    self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
            return torch.tanh(self.b(self.a(x))) - self.mean

    model, x = Centers().double(), torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    expected = 0.0
    for part in x.chunk(4):
        loss = plain(part).square().mean() / 4
        loss.backward()
        expected += float(loss.detach())
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=4)
    with pl.Pipeline(model, schedule, loss_fn=lambda y, _: y.square().mean(), example=x[:2], cut="parameters") as pipe:
        assert float(pipe.step(x, x)) == pytest.approx(expected, abs=1e-12)
        torch.testing.assert_close(pipe.state_dict()["mean"], plain.mean)
        torch.testing.assert_close(pipe.eval().forward(x), plain.eval()(x))  # of the changed buffer
        pipe.evaluate(x, x)
        assert torch.is_grad_enabled()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_what_the_forward_handles_without_a_trace() -> None:
    """Errors that the forward handles anyway, those of first calls, and a trace function of another tool."""

    @functools.cache
    def found_once() -> float:
        try:
            raise ValueError
        except ValueError:
            return 2.0

    class Looks(_Two):
        def between(self, h: Tensor) -> Tensor:
            try:
                scale = self.known["two"]
            except KeyError:
                scale = self.known["one"] * found_once()
            for row in iter(h.unbind(1)):
                scale = scale + row.mean()
            return h * scale if hasattr(self, "missing") else h + scale

    calls: list[str] = []

    def tool(frame: object, event: str, arg: object) -> None:
        calls.append(event)

    class Fails(_Two):
        def between(self, h: Tensor) -> Tensor:
            return h * int(h.sum())

    before = sys.gettrace()
    sys.settrace(tool)
    try:
        stages = split(Looks(), 2, example=torch.ones(2, 4), cut="parameters")
        assert sys.gettrace() is tool
        with pytest.raises(SplitError, match="cannot be traced at"):
            split(Fails(), 2, example=torch.ones(2, 4), cut="parameters")
        assert sys.gettrace() is tool
        assert not torch.overrides._get_current_function_mode_stack()
    finally:
        sys.settrace(before)
    assert len(stages.modules) == 2


def test_an_example_that_the_model_does_not_take() -> None:
    class Embeds(_Two):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4)

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(self.table(ids))

    with pytest.raises(SplitError, match=r"the forward of Embeds raises IndexError.* Pass inputs"):
        split(Embeds(), 2, example=torch.full((2, 3), 7), cut="parameters")


def test_a_model_without_values_is_checked_by_its_trace() -> None:
    with torch.device("meta"):
        falls, draws, plain = _Falls(), _DrawsInPython(), _Two()
        example = torch.empty(2, 4)
    for model, message in ((falls, "handles an error at"), (draws, "draws from random: a trace")):
        with pytest.raises(SplitError, match=message):
            split(model, 2, example=example, cut="parameters")
    assert len(split(plain, 2, example=example, cut="parameters").modules) == 2


def test_the_graph_of_a_failure_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(_Two):
        def between(self, h: Tensor) -> Tensor:
            print("mine", file=sys.stderr)
            return h * int(h.sum())

    with pytest.raises(SplitError, match="cannot be traced at"):
        split(Prints(), 2, example=torch.ones(2, 4), cut="parameters")
    assert capsys.readouterr().err == "mine\n"
