"""Losses that are no mean over samples produce one warning, whatever functions they call; other losses produce none."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.training.losses import sample_halves
from pipeloom.training.losses.sample_halves import CannotAskError, SampleHalves
from tests.cpu.pairwise import in_turn

F64 = torch.float64
torch.manual_seed(1)
NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(F64)
X, Y = torch.randn(12, 4, dtype=F64), torch.randn(12, 4, dtype=F64)
Loss = Callable[[Any, Any], Tensor]


def each_sample(o: Tensor, t: Tensor) -> list[Tensor]:
    return [F.mse_loss(a, b) for a, b in zip(o, t, strict=True)]


def told(loss_fn: Loss, x: Tensor = X, y: Any = Y, *, num_microbatches: int = 4, steps: int = 3) -> tuple[str, Any]:
    """The warnings of these steps, and the gradients of one step."""
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=num_microbatches)
    with (
        warnings.catch_warnings(record=True) as found,
        pl.Pipeline(copy.deepcopy(NET).to(x.dtype), schedule, loss_fn=loss_fn) as pipe,
    ):
        warnings.simplefilter("always")
        for _ in range(steps):
            pipe.step(x, y)
        return " | ".join(str(each.message) for each in found), [p.grad / steps for p in pipe.parameters()]


def ask(loss_fn: Loss, x: Tensor = X[:5], y: Tensor = Y[:5]) -> str | None:
    return SampleHalves(loss_fn, -100).ask(x, y, F.mse_loss(X[:5], Y[:5]), knows_means=True)


def whole(loss_fn: Loss) -> list[Tensor]:
    return [*torch.autograd.grad(loss_fn(NET(X), Y), [*NET.parameters()])]


SUMS: dict[str, Loss] = {
    "loop": lambda o, t: sum(each_sample(o, t), torch.zeros(())),
    "stack": lambda o, t: torch.stack(each_sample(o, t)).sum(),
    "rows": lambda o, t: ((o - t) ** 2).mean(1).sum(),
    "where": lambda o, t: torch.where(o.isfinite().all(), F.mse_loss(o, t, reduction="sum"), 0.0),
    "nan_to_num": lambda o, t: F.mse_loss(o, t, reduction="sum").nan_to_num(),
    "clamp": lambda o, t: F.mse_loss(o, t, reduction="sum").clamp(max=1e6),
    "constant": lambda o, t: ((o - t) ** 2).sum() / 7,
    "compiled": torch.compile(lambda o, t: F.mse_loss(o, t, reduction="sum"), backend="eager"),
}
OTHERS: dict[str, Loss] = {
    "contrastive": lambda o, t: F.cross_entropy(o @ t.T, torch.arange(len(o))),
    "batch statistics": lambda o, t: ((o - o.mean(0)) ** 2).mean() + F.mse_loss(o, t),
    "root": lambda o, t: F.mse_loss(o, t).sqrt(),
    "sum and mean": lambda o, t: F.mse_loss(o, t, reduction="sum") + F.mse_loss(2 * o, t),
    "weighted classes": lambda o, t: F.cross_entropy(o, t.argmax(1), weight=torch.tensor([1.0, 2, 3, 4], dtype=F64)),
    "compiled mean over a mask": torch.compile(lambda o, t: ((o - t) ** 2)[t > 0].mean(), backend="eager"),
}


@pytest.mark.parametrize(("name", "num_microbatches"), in_turn(SUMS, [2, 4, 6, 12]))
def test_a_sum_over_samples_is_told_once(name: str, num_microbatches: int) -> None:
    text, gradients = told(SUMS[name], num_microbatches=num_microbatches)
    assert text.startswith("loss_fn is a sum over samples, ")
    assert text.endswith("multiply that mean by the number of samples of the whole batch.")
    assert " | " not in text
    for found, wanted in zip(gradients, whole(SUMS[name]), strict=True):
        torch.testing.assert_close(found * num_microbatches, wanted, rtol=1e-12, atol=1e-15)  # so it is to be told


@pytest.mark.parametrize(("name", "num_microbatches"), in_turn(OTHERS, [2, 4, 6, 12]))
def test_a_loss_that_is_neither_a_mean_nor_a_sum_is_told_once(name: str, num_microbatches: int) -> None:
    text, gradients = told(OTHERS[name], num_microbatches=num_microbatches)
    assert text.startswith("loss_fn is neither a mean nor a sum over samples, ")
    assert text.endswith(
        "counts=lambda targets: ...), with their mask or weights, such as w[targets] for class weights w."
    )
    assert " | " not in text
    pairs = zip(gradients, whole(OTHERS[name]), strict=True)
    assert any(not torch.allclose(found, wanted, rtol=1e-3) for found, wanted in pairs)


def balanced(o: Tensor, t: Tensor) -> Tensor:
    """Two terms, the second scaled to the value of the first."""
    one, other = F.mse_loss(o, t), F.smooth_l1_loss(o, 2 * t)
    return one + other * (one / other).detach()


DETACHED: dict[str, Loss] = {
    "balanced": balanced,
    "compiled": torch.compile(lambda o, t: F.mse_loss(o, t) / F.mse_loss(o, t).detach(), backend="eager"),
}


@pytest.mark.parametrize(("name", "num_microbatches"), in_turn(DETACHED, [2, 4, 6, 12]))
def test_gradients_that_depend_on_other_samples_are_told_once(name: str, num_microbatches: int) -> None:
    text, gradients = told(DETACHED[name], num_microbatches=num_microbatches)
    assert text.startswith("loss_fn gives samples gradients that depend on other samples")
    assert " | " not in text
    pairs = zip(gradients, whole(DETACHED[name]), strict=True)
    assert any(not torch.allclose(found, wanted, rtol=1e-3) for found, wanted in pairs)


class Centre(nn.Module):
    """Has a state that each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, o: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(o, t) * self.calls / self.calls


def in_place(o: Tensor, t: Tensor) -> Tensor:
    o -= t
    t.zero_()
    return (o**2).mean()


MEANS: dict[str, Loss] = {
    "mean": F.mse_loss,
    "loop": lambda o, t: sum(each_sample(o, t), torch.zeros(())) / len(o),
    "inside": lambda o, t: sum((each / len(o) for each in each_sample(o, t)), torch.zeros(())),
    "rows": lambda o, t: ((o - t) ** 2).sum(1).mean(),
    "centre": lambda o, t: (o - t).mean(),  # of both signs
    "state": Centre(),
    "weighted by its own values": lambda o, t: ((o - t) ** 2 * (o - t).abs().detach()).mean(),
    "zero": lambda o, t: (o - t).relu().mean() * 0.0,
    "nothing": lambda o, t: o.mean() * float("inf"),
}


@pytest.mark.parametrize(("name", "num_microbatches"), in_turn(MEANS, [2, 4, 6, 12]))
def test_a_mean_over_samples_is_not_told(name: str, num_microbatches: int) -> None:
    text, gradients = told(MEANS[name], num_microbatches=num_microbatches)
    assert text == ""
    if name != "nothing":
        for found, wanted in zip(gradients, whole(MEANS[name]), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_one_micro_batch_is_the_whole_batch() -> None:
    for loss_fn in (*SUMS.values(), *OTHERS.values()):
        assert told(loss_fn, num_microbatches=1)[0] == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_other_function(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(192, 4, generator=generator).to(dtype) for _ in range(2))
    assert told(F.mse_loss, x, y)[0] == ""
    assert told(lambda o, t: F.cross_entropy(o, t.argmax(1)), x, y)[0] == ""
    assert "is a sum" in told(SUMS["nan_to_num"], x, y)[0]


def test_samples_of_which_a_loss_takes_no_part() -> None:
    size, table = torch.rand(3, dtype=F64), torch.rand(5, 4, dtype=F64)
    assert told(lambda o, t: (size[:, None] * (o - t) ** 2).mean() + table.mean() * o.mean())[0] == ""
    pairs: Loss = lambda o, t: (o.unflatten(0, (-1, 3)).mean(1) ** 2).mean()  # noqa: E731
    assert told(pairs)[0] == ""
    with pytest.raises(CannotAskError):
        ask(F.mse_loss, X[:6])


def test_states_of_a_loss_and_random_numbers_stay() -> None:
    centre, x, y = Centre(), X[:5].clone(), Y[:5].clone()
    with pytest.raises(CannotAskError):
        ask(centre)
    assert centre.calls == 0
    assert ask(in_place, x, y) is None
    assert torch.equal(x, X[:5])
    assert torch.equal(y, Y[:5])
    before = torch.get_rng_state()
    for draws in (F.dropout, lambda each: each * torch.rand_like(each)):
        with pytest.raises(CannotAskError):
            ask(lambda o, t, draws=draws: F.mse_loss(draws(o), t))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_microbatches", [2, 4, 6])
def test_a_loss_needs_several_samples(num_microbatches: int) -> None:
    """Halves have at least two samples: the standard deviation of one sample raises a warning in torch."""

    def normalized(o: Tensor, t: Tensor) -> Tensor:
        return ((t[:, :1] - t[:, 0].mean()) / t[:, 0].std() * o).mean()

    text, _ = told(normalized, num_microbatches=num_microbatches)
    assert text.startswith("loss_fn is neither a mean nor a sum over samples, ")
    assert " | " not in text


def test_an_output_has_numbers_and_other_values() -> None:
    output = {"out": X[:2], "number": torch.tensor(2.0), "name": "x"}
    halves = SampleHalves(lambda o, t: SUMS["stack"](o["out"], t) * o["number"], -100)
    losses = [2 * SUMS["stack"](x, y) for x, y in ((X[:2], Y[:2]), (X[2:5], Y[2:5]))]
    assert halves.ask(output, Y[:2], losses[0], knows_means=True) is None
    text = halves.ask({**output, "out": X[2:5]}, Y[2:5], losses[1], knows_means=True)
    assert text is not None
    assert "is a sum over samples" in text
    assert "for 5 samples" in text


@pytest.mark.parametrize("num_microbatches", [6, 12])  # compared by halves, and in pairs
def test_large_outputs_are_not_compared(num_microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is a sum" in told(SUMS["stack"], num_microbatches=num_microbatches)[0]
    for name in ("_MOST_BYTES", "_FEW_BYTES"):
        monkeypatch.setattr(sample_halves, name, 8)
    assert told(SUMS["stack"], num_microbatches=num_microbatches)[0] == ""


def test_outputs_that_are_not_small_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_place(o: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(o.mul_(2.0), t, reduction="sum")

    with torch.no_grad():
        output, loss = X.clone(), in_place(X.clone(), Y)
    assert "is a sum" in str(SampleHalves(in_place, -100).ask(output, Y, loss, knows_means=True))
    monkeypatch.setattr(sample_halves, "_FEW_BYTES", 8)
    with pytest.raises(CannotAskError):
        SampleHalves(in_place, -100).ask(output, Y, loss, knows_means=True)
    assert torch.equal(output, X)
    given: list[Tensor] = []
    rows = SampleHalves(lambda o, t: given.append(o) or SUMS["rows"](o, t), -100)
    text = str(rows.ask(output, Y, SUMS["rows"](X, Y), knows_means=True))
    assert "is a sum" in text
    assert "for 4 samples" in text  # of 12
    assert all(each.untyped_storage()._cdata == output.untyped_storage()._cdata for each in given)


def test_no_message_is_sent() -> None:
    def gathering(o: Tensor, t: Tensor) -> Tensor:
        total = o.detach().sum()
        dist.all_reduce(total)
        calls.append(total)
        return F.mse_loss(o, t) / total

    calls: list[Tensor] = []
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(CannotAskError):
            ask(gathering)
    finally:
        dist.destroy_process_group()
    assert not calls
