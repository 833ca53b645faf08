"""Attributes of a model whose forward stages run: set by the user between steps, and by the forward itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipeloom.errors import PipeloomError
from tests.cpu.test_planned_values import Net, compared, float64, pipeline

__all__ = ["float64"]


class Told(Net):
    def __init__(self):
        super().__init__()
        self.mode, self.scale = "chain", 1.0
        self.activation, self.drop = nn.ELU(), nn.Dropout(0.0)

    def forward(self, x):
        first = self.first(x)
        y = self.activation(self.through(self.drop(first))) * self.scale
        return self.last(y * first if self.mode == "skip" else y)


def test_attributes_that_are_set_after_the_pipeline_was_built():
    model, x = Told(), torch.randn(8, 2, 4)
    with pipeline(model) as pipe:
        for owner, name, value in (
            (model, "scale", 2.0),
            (model, "mode", "skip"),  # another value travels between stages
            (model.activation, "alpha", 0.3),
            (model.drop, "p", 1.0),
            (model, "mode", "chain"),
        ):
            setattr(owner, name, value)
            assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12, name
        model.extra = 1
        del model.extra, model.mode
        Told.mode = "skip"
        try:
            assert compared(model, {"x": x}, x.flip(0), pipe) < 1e-12
        finally:
            del Told.mode


class Counts(Net):
    """From the third call on, the last stage reads what the first has computed."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        first = self.first(x)
        y = self.through(first)
        return self.last(y * first if self.calls > 2 else y) * self.calls


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_forward_that_counts_its_calls(schedule):
    model, x = Counts(), torch.randn(8, 2, 4)
    plain = copy.deepcopy(model)
    with pipeline(model, schedule=schedule) as pipe:
        for _ in range(2):
            loss = pipe.step({"x": x}, x)
            expected = sum(F.mse_loss(plain(each), each) / 4 for each in x.split(2))
            expected.backward()
            assert abs(loss - expected) < 1e-12 * expected
        for name, parameter in pipe.named_parameters():
            assert torch.allclose(parameter.grad, plain.get_parameter(name).grad, rtol=1e-12), name


class Keeps(Net):
    """Adds what the first layer computed in the call before."""

    kept = None

    def forward(self, x):
        first = self.first(x)
        y = self.through(first)
        y = y if self.kept is None else y + self.kept
        self.kept = first.detach()
        return self.last(y)


def test_values_that_a_call_leaves_for_another_stage_are_refused():
    with pipeline(Keeps(), schedule="gpipe") as pipe, pytest.raises(PipeloomError, match="several earlier stages"):
        pipe.step({"x": torch.randn(8, 2, 4)}, torch.randn(8, 2, 4))
