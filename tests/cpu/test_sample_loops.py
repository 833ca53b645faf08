"""A model whose own loss adds up the losses of its samples trains their sum; where this is unknown, it warns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from tests.cpu.pairwise import in_turn

F64 = torch.float64
SCALE = nn.Parameter(torch.tensor(0.3, dtype=F64))
Loss = Callable[[Tensor, Tensor], Any]


class Own(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.a, self.b, self.loss = nn.Linear(4, 4), nn.Linear(4, 4), loss

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.b(self.a(x).tanh())
        return {"loss": self.loss(output, labels), "output": output}


def added(o: Tensor, t: Tensor) -> Tensor:
    loss = o.new_zeros(())
    for index in range(len(o)):
        loss = loss + F.mse_loss(o[index], t[index])
    return loss


def squares(a: Tensor, b: Tensor) -> Tensor:
    return (a - b) ** 2


LOSSES: dict[str, Loss] = {
    "added": added,
    "index": lambda o, t: sum(F.mse_loss(o[i], t[i]) for i in range(len(o))),
    "from the end": lambda o, t: sum(F.mse_loss(o[-i - 1], t[-i - 1]) for i in range(len(o))),
    "unbind": lambda o, t: sum(F.mse_loss(a, b) for a, b in zip(o, t, strict=True)),
    "split": lambda o, t: sum(F.l1_loss(a, b) for a, b in zip(o.split(1), t.split(1), strict=True)),
    "slice": lambda o, t: sum(F.mse_loss(o[i : i + 1], t[i : i + 1]) for i in range(len(o))),
    "stack": lambda o, t: torch.stack([F.mse_loss(a, b) for a, b in zip(o, t, strict=True)]).sum(),
    "means": lambda o, t: sum(squares(a, b).mean() for a, b in zip(o, t, strict=True)),
    "sums": lambda o, t: sum(squares(a, b).sum() for a, b in zip(o, t, strict=True)),
    "divided": lambda o, t: sum(squares(a, b).sum() / 4 for a, b in zip(o, t, strict=True)),
    "other elements": lambda o, t: sum(squares(a, b)[:3].sum() / 7 for a, b in zip(o, t, strict=True)),
    "two losses": lambda o, t: sum(F.mse_loss(a, b) + F.l1_loss(a, b) for a, b in zip(o, t, strict=True)),
    "mean of index": lambda o, t: added(o, t) / len(o),
    "mean inside": lambda o, t: sum(F.mse_loss(a, b) / len(o) for a, b in zip(o, t, strict=True)),
    "mean of stack": lambda o, t: torch.stack([F.mse_loss(a, b) for a, b in zip(o, t, strict=True)]).mean(),
    "mean of sums": lambda o, t: sum(squares(a, b).sum() for a, b in zip(o, t, strict=True)) / len(o),
    "mean of divided": lambda o, t: sum(squares(a, b).sum() / (4 * len(o)) for a, b in zip(o, t, strict=True)),
    "mean and a mean": lambda o, t: added(o, t) / len(o) + F.l1_loss(o, t),
    "sum and a sum": lambda o, t: added(o, t) + F.l1_loss(o, t, reduction="sum"),
    "two means": lambda o, t: F.mse_loss(o, t) + F.mse_loss(2 * o, t),
    "where": lambda o, t: torch.where(o.isfinite().all(), squares(o, t).sum(), 0.0),
    "nan_to_num": lambda o, t: F.mse_loss(o, t, reduction="sum").nan_to_num(),
    "clamp": lambda o, t: F.mse_loss(o, t).clamp(max=1e6),
    "weighted": lambda o, t: F.mse_loss(o, t) * SCALE.exp() + F.l1_loss(o, t) / SCALE + (SCALE**2).sum().sqrt(),
}
UNKNOWN: dict[str, Loss] = {
    "sum and a mean": lambda o, t: F.mse_loss(o, t) + F.mse_loss(2 * o, t, reduction="sum"),
    "loop and a mean": lambda o, t: added(o, t) + F.l1_loss(o, t),
    "root": lambda o, t: F.mse_loss(o, t).sqrt(),
    "ratio": lambda o, t: 1 - (o * t).sigmoid().sum() / (o.sigmoid().sum() + t.sigmoid().sum()),
    "product": lambda o, t: F.mse_loss(o, t) * F.l1_loss(o, t),
}


def stepped(loss: Loss, num_samples: int, num_microbatches: int = 4) -> tuple[list[Any], list[Any], list[Any]]:
    """Warnings, gradients, and gradients of the whole batch at once."""
    generator = torch.Generator().manual_seed(1)
    x, labels = (torch.randn(num_samples, 4, generator=generator, dtype=F64) for _ in range(2))
    torch.manual_seed(0)
    model = Own(loss).double()
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=num_microbatches)
    with (
        warnings.catch_warnings(record=True) as told,
        pl.Pipeline(copy.deepcopy(model), schedule, layers=["a", "b"]) as pipe,
    ):
        warnings.simplefilter("always")
        for _ in range(2):
            pipe.step({"x": x, "labels": labels})
        found = [parameter.grad / 2 for parameter in pipe.parameters()]
    wanted = torch.autograd.grad(model(x, labels)["loss"], [*model.parameters()])
    return [str(each.message) for each in told], found, [*wanted]


@pytest.mark.parametrize(("name", "num_samples"), in_turn(LOSSES, [8, 12, 22]))
def test_the_loss_of_the_batch_is_trained(name: str, num_samples: int) -> None:
    told, found, wanted = stepped(LOSSES[name], num_samples)
    assert not told
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["added", "unbind", "split", "slice", "stack", "means"])
def test_a_loop_over_one_sample_is_told(name: str) -> None:
    told, _, _ = stepped(LOSSES[name], 4)
    assert len(told) == 1
    assert "the pipeline cannot tell how losses of micro-batches combine" in told[0]


@pytest.mark.parametrize("name", ["mean of index", "mean inside", "mean of stack", "mean of sums"])
def test_a_mean_over_one_sample(name: str) -> None:
    told, found, wanted = stepped(LOSSES[name], 4)
    assert not told
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("name", "num_samples"), in_turn(UNKNOWN, [8, 12, 22]))
def test_other_losses_are_told_once(name: str, num_samples: int) -> None:
    told, found, wanted = stepped(UNKNOWN[name], num_samples)
    assert len(told) == 1
    assert told[0].startswith("Own computes its own loss from ")
    assert "the pipeline cannot tell how losses of micro-batches combine" in told[0]
    assert not torch.allclose(found[0], wanted[0], rtol=1e-6)
