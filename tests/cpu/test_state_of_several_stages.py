"""State that stages share in silence: buffers that forwards change, and parameters that a loss reads."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def schedule(ranks: int = 2):
    return pl.schedules.one_f_one_b(num_ranks=ranks, num_microbatches=4)


def twice() -> nn.Sequential:
    """One BatchNorm in front and at the end."""
    norm = nn.BatchNorm1d(4)
    return nn.Sequential(norm, nn.Linear(4, 4), nn.Linear(4, 4), norm)


class Average(nn.Module):
    def __init__(self, mean: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return y - self.mean


def averages() -> nn.Sequential:
    mean = torch.zeros(4)
    return nn.Sequential(Average(mean), nn.Tanh(), nn.Tanh(), Average(mean))


@pytest.mark.parametrize(("make", "name"), [(twice, "running_mean"), (averages, "mean")])
def test_buffers_that_several_stages_change_are_told_once(make, name):
    with pl.Pipeline(make(), schedule(), loss_fn=F.mse_loss) as pipe:
        with pytest.warns(UserWarning, match=f"^forwards change the buffer '[03].{name}', which stages 0 and 1"):
            pipe.step(X, Y)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(X, Y)


@pytest.mark.parametrize("make", [twice, averages])
def test_buffers_that_stay_may_be_on_several_stages(make):
    model = make().eval()
    with pl.Pipeline(model, schedule(), loss_fn=F.mse_loss) as pipe:
        torch.testing.assert_close(pipe.step(X, Y), F.mse_loss(model(X), Y).detach())
    with pl.Pipeline(make(), schedule(1), loss_fn=F.mse_loss) as pipe:
        assert pipe.step(X, Y).isfinite()


class Counted(nn.Module):
    """A trace whose buffer changes in front and behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index in (0, 5):
                self.seen.add_(x.detach().mean(0))
                x = x + self.seen
        return x


def test_traced_buffers_that_several_stages_change_are_refused():
    with pytest.raises(InputError, match=r"^stages 0 and 2 would use 'seen', a buffer that the forward changes"):
        pl.Pipeline(Counted(), schedule(3), loss_fn=F.mse_loss, example=X[:2], cut="parameters")


def _penalized(rank: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def loss_fn(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, targets) + sum(p.square().sum() for p in model.parameters())

    pipe = pl.Pipeline(model, schedule(), loss_fn=loss_fn, timeout_seconds=20)
    with pipe, pytest.raises(pl.PipeloomError) as raised:
        pipe.step(X, Y)
    return str(raised.value)


def test_a_loss_of_parameters_on_other_ranks_is_refused():
    _, last = run_ranks(_penalized, 2)
    assert "InputError: loss_fn reads the parameter '0." in last


class Hidden(nn.Module):
    """Reads the weight of another layer, which is no part of it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(4, 4), [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(F.linear(x, self.others[0].weight))


def _hidden(rank: int, place: int) -> str:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(4)]
    layers[place] = Hidden(layers[0])
    pipe = pl.Pipeline(nn.Sequential(*layers[:3]), schedule(3), loss_fn=F.mse_loss, timeout_seconds=20)
    with pipe, pytest.raises(pl.PipeloomError) as raised:
        pipe.step(X, Y)
    return str(raised.value)


@pytest.mark.parametrize("place", [1, 2])
def test_a_layer_that_reads_a_parameter_of_another_rank_is_refused(place):
    assert f"stage {place} reads the parameter '0.weight' of another rank" in run_ranks(_hidden, 3, place)[place]


def test_a_list_with_a_value_for_each_sample_is_refused():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
            return self.last(self.first(x)) * len(names)

    with pl.Pipeline(Named(), schedule(), loss_fn=F.mse_loss, layers=["first", "last"]) as pipe:
        with pytest.raises(InputError, match=r"^inputs\['names'\] is a list of 8 values, as many as"):
            pipe.step({"x": X, "names": ["a"] * 8}, Y)
        pipe.step({"x": X, "names": ("a",) * 8}, Y)
