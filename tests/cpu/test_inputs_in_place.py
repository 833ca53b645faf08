"""Stages that change their inputs in place: the caller's batch stays, and the gradients are the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import RunError

F64 = torch.float64


class Residual(nn.Module):
    """Receives the batch, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.linear = nn.ReLU(inplace=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.relu(x))


class Scale(nn.Module):
    """No submodule says that it works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.full((4,), 2.0)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x *= self.weight
        return self.linear(x)


class Named(nn.Module):
    """Takes a dict, and changes it and a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        given["x"] = F.relu_(given["x"])
        given["twice"] = 2 * given["x"]
        return self.linear(given.pop("twice"))


FIRST = {
    "relu": lambda: nn.ReLU(inplace=True),
    "residual": Residual,
    "scale": Scale,
    "named": Named,
    "view": nn.Flatten,  # the second stage changes what the first returned: the batch itself
}


def make(first: str) -> nn.Sequential:
    torch.manual_seed(0)
    second = nn.ReLU(inplace=True) if first == "view" else nn.Linear(4, 4)
    return nn.Sequential(FIRST[first](), second, nn.ReLU(inplace=True), nn.Linear(4, 4)).to(F64)


def make_batch(first: str) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(10, 4, generator=generator, dtype=F64) for _ in range(2))
    return ({"x": x} if first == "named" else x), y


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize(("name", "transport"), [("1f1b", "threads"), ("zb-v", "loopback")])
def test_the_batch_stays(first: str, name: str, transport: str) -> None:
    model = make(first)
    inputs, targets = make_batch(first)
    loss = F.mse_loss(model(inputs), targets)
    loss.backward()
    expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    inputs, targets = make_batch(first)
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    cut = [1, 3] if name == "1f1b" else [1, 1, 1, 1]
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, transport=transport, cut=cut, check=inputs) as pipe:
        for run in (pipe.step, pipe.evaluate, lambda x, _: pipe.forward(x), pipe.step):
            found = run(inputs, targets)
            if not found.dim():
                torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
            torch.testing.assert_close(inputs, make_batch(first)[0], rtol=0, atol=0)
        for key, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * expected[key], rtol=1e-12, atol=1e-15)


def test_only_stages_that_work_in_place_get_copies() -> None:
    """After the first run."""
    seen: list[int] = []

    class Seen(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.data_ptr())
            return super().forward(x)

    inputs, targets = make_batch("relu")
    model = nn.Sequential(Seen(4, 4, dtype=F64), nn.ReLU(inplace=True), nn.Linear(4, 4, dtype=F64))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=1)
    with pl.Pipeline(model, schedule, loss_fn=F.mse_loss, cut=[2, 1]) as pipe:
        pipe.step(inputs, targets)
        pipe.step(inputs, targets)
    assert [pointer == inputs.data_ptr() for pointer in seen] == [False, True]


def test_a_stage_that_works_in_place_later_is_told() -> None:
    class Later(nn.Linear):
        changes = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu_() if self.changes else x)

    inputs, targets = make_batch("relu")
    model = nn.Sequential(Later(4, 4, dtype=F64), nn.Linear(4, 4, dtype=F64))
    with pl.Pipeline(model, pl.schedules.build("1f1b", num_ranks=2, num_microbatches=1), loss_fn=F.mse_loss) as pipe:
        pipe.step(inputs, targets)
        model[0].changes = True
        with pytest.warns(UserWarning, match="the first stage has changed its inputs in place"):
            pipe.step(inputs, targets)
        inputs, _ = make_batch("relu")
        pipe.step(inputs, targets)
        assert torch.equal(inputs, make_batch("relu")[0])


def test_recomputation_of_a_changed_input_is_refused() -> None:
    """A block that says so gets a copy; the recomputation of another would start from changed values."""
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(make("residual"), schedule, loss_fn=F.mse_loss, recompute="full") as pipe:
        pipe.step(*make_batch("residual"))
    with (
        pl.Pipeline(make("scale"), schedule, loss_fn=F.mse_loss, recompute="full") as pipe,
        pytest.raises(
            RunError, match=r"module '0' \(Scale\) changes its input in place: its recomputation would start"
        ),
    ):
        pipe.step(*make_batch("scale"))
