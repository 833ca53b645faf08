"""Losses that are means over selected elements: told where micro-batches have different numbers, and the way out."""

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
from pipeloom.errors import InputError
from pipeloom.training.losses.element_means import means_of
from pipeloom.training.losses.reductions import Reductions
from tests.cpu.pairwise import of_grid
from tests.cpu.test_label_means import schedule_of

F64 = torch.float64


def weighted(errors: Tensor, mask: Tensor) -> Tensor:
    return (errors * mask[..., None]).sum() / (4 * mask.sum())


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mse": lambda o, mask, y: F.mse_loss(o[mask], y[mask]),
    "index": lambda o, mask, y: ((o - y) ** 2)[mask].mean(),
    "divide": lambda o, mask, y: weighted((o - y) ** 2, mask),
    "reduce": lambda o, mask, y: weighted(F.mse_loss(o, y, reduction="none"), mask),
    "l1": lambda o, mask, y: 0.5 * F.smooth_l1_loss(o[mask], y[mask]),
    "bce": lambda o, mask, y: F.binary_cross_entropy_with_logits(o[mask], (y[mask] > 0).double()),
    "inside": lambda o, mask, y: ((o - y) ** 2 * mask[..., None] / mask.sum()).sum(),
    "classes": lambda o, mask, y: F.cross_entropy(o[mask], y[mask].argmax(-1)),
    "reciprocal": lambda o, mask, y: ((o - y) ** 2)[mask].sum() * (1 / mask.sum().double()),
}
SEEN = {
    "mse": r"a mse_loss \(mean over 48 elements of 2 samples, 8 of 2 in another micro-batch\)",
    "index": r"a mean \(over 48 elements of 2 samples, 8 of 2 in another micro-batch\)",
    "divide": r"a sum \(divided by 48 for 2 samples, by 8 for 2 in another micro-batch\)",
    "reduce": r"a sum \(divided by 48 for 2 samples, by 8 for 2 in another micro-batch\)",
    "l1": r"a smooth_l1_loss \(mean over 96 elements of 2 samples, 16 of 2 in another micro-batch\)",
    "bce": r"a binary_cross_entropy_with_logits \(mean over 48 elements of 2 samples, 8 of 2",
    "inside": r"a sum \(divided by 12 for 2 samples, by 2 for 2 in another micro-batch\)",
    "classes": r"a cross_entropy \(mean over 12 elements of 2 samples, 2 of 2 in another micro-batch\)",
    "reciprocal": r"a sum \(divided by 12 for 2 samples, by 2 for 2 in another micro-batch\)",
}


class Masked(nn.Module):
    """Computes its loss over the elements of a mask."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.name = nn.Linear(4, 4), nn.Linear(4, 4), name

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.b(self.a(x).tanh())
        return {"loss": LOSSES[self.name](output, mask, labels), "output": output}


torch.manual_seed(0)
X, Y = torch.randn(8, 6, 4, dtype=F64), torch.randn(8, 6, 4, dtype=F64)
UNEQUAL = torch.arange(6) < torch.tensor([6, 6, 1, 1, 5, 6, 2, 1])[:, None]
EQUAL = torch.arange(6) < torch.tensor([6, 1, 1, 6, 5, 2, 3, 4])[:, None]


def make(name: str) -> Masked:
    torch.manual_seed(0)
    return Masked(name).double()


def one_f_one_b() -> pl.Schedule:
    return pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)


def equals_whole(pipe: pl.Pipeline, found: Tensor, model: nn.Module, loss: Tensor) -> None:
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    for (name, parameter), wanted in zip(pipe.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("name", LOSSES)
def test_a_models_own_mean_of_means_is_told_once_and_has_a_way_out(name: str) -> None:
    batch = {"x": X, "mask": UNEQUAL, "labels": Y}
    with pl.Pipeline(make(name), one_f_one_b(), layers=["a", "b"]) as pipe:
        with pytest.warns(UserWarning, match=rf"from {SEEN[name]}.* the mean of their means.*mean_over_labels") as told:
            pipe.step(batch)
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(batch)
    model = make(name)
    loss_fn = pl.mean_over_labels(lambda output, mask: output["loss"], counts=lambda mask: mask)
    with pl.Pipeline(copy.deepcopy(model), one_f_one_b(), layers=["a", "b"], loss_fn=loss_fn) as pipe:
        equals_whole(pipe, pipe.step(batch, UNEQUAL), model, model(**batch)["loss"])


@pytest.mark.parametrize("name", LOSSES)
def test_equal_numbers_of_elements_are_not_told(name: str) -> None:
    batch = {"x": X, "mask": EQUAL, "labels": Y}
    model = make(name)
    with warnings.catch_warnings(), pl.Pipeline(copy.deepcopy(model), one_f_one_b(), layers=["a", "b"]) as pipe:
        warnings.simplefilter("error")
        pipe.evaluate(batch)
        equals_whole(pipe, pipe.step(batch), model, model(**batch)["loss"])


def test_a_later_batch_with_other_numbers_is_told() -> None:
    with pl.Pipeline(make("mse"), one_f_one_b(), layers=["a", "b"]) as pipe:
        pipe.step({"x": X, "mask": EQUAL, "labels": Y})
        with pytest.warns(UserWarning, match="mean over 48 elements"):
            pipe.step({"x": X, "mask": UNEQUAL, "labels": Y})


def test_a_traced_model_is_told() -> None:
    batch = {"x": X, "mask": UNEQUAL, "labels": Y}
    example = {name: value[:2] for name, value in batch.items()}
    with (
        pl.Pipeline(make("divide"), one_f_one_b(), example=example, cut=["b"]) as pipe,
        pytest.warns(UserWarning, match=SEEN["divide"]),
    ):
        pipe.step(batch)


# A loss_fn

NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(F64)
WEIGHTS = torch.rand(8, 6, generator=torch.Generator().manual_seed(2), dtype=F64)
TARGETS = {"y": Y, "mask": UNEQUAL, "weights": WEIGHTS * UNEQUAL}


def over_weights(output: Tensor, t: dict[str, Tensor]) -> Tensor:
    return (((output - t["y"]) ** 2).mean(-1) * t["weights"]).sum() / t["weights"].sum()


def with_metric(output: Tensor, t: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"loss": over_weights(output, t), "twice": 2 * over_weights(output, t)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("mask", ["unequal", "equal"])
def test_a_loss_fn_that_is_a_mean_of_means_is_told(name: str, mask: str) -> None:
    def loss_fn(output: Tensor, t: dict[str, Tensor]) -> Tensor:
        return LOSSES[name](output, t["mask"], t["y"])

    targets = {"y": Y, "mask": UNEQUAL if mask == "unequal" else EQUAL}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pl.Pipeline(copy.deepcopy(NET), one_f_one_b(), loss_fn=loss_fn) as pipe:
            for _ in range(2):
                pipe.step(X, targets)
    texts = [str(each.message) for each in told]
    assert len(texts) == (mask == "unequal")
    for text in texts:
        assert text.startswith("loss_fn is a mean over different numbers of elements, a ")
        assert "pass loss_fn=pipeloom.mean_over_labels(loss_fn, counts=lambda targets: ...)" in text


def test_another_label_that_does_not_count_inside_of_a_function_is_told() -> None:
    def loss_fn(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0)

    labels = Y.argmax(-1).masked_fill(~UNEQUAL, 0)
    with (
        pl.Pipeline(copy.deepcopy(NET), one_f_one_b(), loss_fn=loss_fn) as pipe,
        pytest.warns(UserWarning, match=r"mean_over_labels\(loss_fn, ignore_index=0\)"),
    ):
        pipe.step(X, labels)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        (schedule_of("zb-h1", num_microbatches=4), {}),
        (schedule_of("seq1f1b", num_microbatches=3, num_slices=2), {}),
        (schedule_of("dualpipev", num_microbatches=4), {"recompute": "full"}),
    ],
)
@pytest.mark.parametrize("kind", ["mask", "weights"])
def test_counts_make_the_mean_over_the_elements_of_the_batch(schedule: pl.Schedule, options: Any, kind: str) -> None:
    plain = (lambda o, t: LOSSES["mse"](o, t["mask"], t["y"])) if kind == "mask" else with_metric
    loss_fn = pl.mean_over_labels(plain, counts=lambda t: t[kind])
    model = nn.Sequential(*copy.deepcopy(NET), nn.Identity())
    with warnings.catch_warnings(), pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=loss_fn, **options) as pipe:
        warnings.simplefilter("error")
        whole = plain(model(X), TARGETS)
        whole = whole["loss"] if kind == "weights" else whole
        torch.testing.assert_close(pipe.evaluate(X, TARGETS), whole.detach(), rtol=1e-12, atol=0)
        equals_whole(pipe, pipe.step(X, TARGETS), model, whole)
        if kind == "weights":
            assert pipe.metrics()["twice"] == pytest.approx(2 * whole.item(), rel=1e-12)


def test_counts_of_all_replicas() -> None:
    whole = over_weights(NET(X), TARGETS)

    def work() -> None:
        loss_fn = pl.mean_over_labels(over_weights, counts=lambda t: t["weights"])
        with (
            pl.Mesh(pp=2, dp=2) as mesh,
            pl.Pipeline(
                copy.deepcopy(NET), schedule_of("1f1b", num_microbatches=2), loss_fn=loss_fn, mesh=mesh
            ) as pipe,
        ):
            own = slice(0, 5) if mesh.coordinate("dp") == 0 else slice(5, 8)
            found = pipe.step(X[own], {name: each[own] for name, each in TARGETS.items()})
            assert found.item() == pytest.approx(whole.item(), rel=1e-12)

    pl.run_threads(4, work, timeout_seconds=120)


@pytest.mark.parametrize(("mask", "own", "num_microbatches"), of_grid(["unequal", "equal"], [False, True], [1, 2]))
def test_other_numbers_in_other_replicas_are_told(mask: str, own: bool, num_microbatches: int) -> None:
    numbers = {"unequal": [[5, 5, 5, 5], [2, 2, 2, 2]], "equal": [[6, 1, 3, 4], [4, 3, 5, 2]]}[mask]

    def work() -> None:
        schedule = schedule_of("1f1b", num_microbatches=num_microbatches)
        with pl.Mesh(pp=2, dp=2) as mesh:
            replica = mesh.coordinate("dp")
            rows, inside = (
                slice(4 * replica, 4 * replica + 4),
                torch.arange(6) < torch.tensor(numbers[replica])[:, None],
            )
            batch = {"x": X[rows], "mask": inside, "labels": Y[rows]}
            options: dict[str, Any] = {"layers": ["a", "b"]}
            if not own:
                options = {"loss_fn": lambda o, t: LOSSES["mse"](o, t["mask"], t["y"])}
            with pl.Pipeline(make("mse") if own else copy.deepcopy(NET), schedule, mesh=mesh, **options) as pipe:
                for _ in range(4):
                    pipe.step(batch) if own else pipe.step(X[rows], {"y": Y[rows], "mask": inside})

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pl.run_threads(4, work, timeout_seconds=120)
    texts = [str(each.message) for each in told]
    unit = "label" if own else "sample"
    assert len(texts) == (2 if mask == "unequal" else 0)  # the last stage of each replica
    for text in texts:
        assert f"per {unit} in this replica, " in text
        assert "the pipeline trains the mean of their means" in text


def test_counts_that_are_wrong_are_one_line() -> None:
    with pytest.raises(InputError, match="counts='mask': must be a function"):
        pl.mean_over_labels(over_weights, counts="mask")
    with pytest.raises(InputError, match="counts with shift or ignore_index"):
        pl.mean_over_labels(over_weights, counts=lambda t: t["mask"], shift=True)
    for counts, seen in (
        (lambda t: t["masks"], "counts raised KeyError: 'masks' for the targets a dict with 'y', 'mask', 'weights'"),
        (lambda t: t["mask"].sum(), "counts returned tensor.* must be a mask, or weights"),
        (lambda t: t["weights"] - 1, "counts returned weights with the sum -.*: must be finite and not below 0"),
    ):
        with (
            pl.Pipeline(
                copy.deepcopy(NET), one_f_one_b(), loss_fn=pl.mean_over_labels(over_weights, counts=counts)
            ) as pipe,
            pytest.raises(InputError, match=seen) as error,
        ):
            pipe.step(X, TARGETS)
        assert "\n" not in str(error.value)


def test_a_batch_in_which_nothing_counts_has_loss_zero_and_is_told() -> None:
    loss_fn = pl.mean_over_labels(over_weights, counts=lambda t: t["weights"])
    with pl.Pipeline(copy.deepcopy(NET), one_f_one_b(), loss_fn=loss_fn) as pipe:
        with pytest.warns(UserWarning, match="counts is 0 everywhere in the batch: the loss is 0"):
            assert pipe.step(X, {**TARGETS, "weights": WEIGHTS * 0}) == 0
        assert all(not parameter.grad.any() for parameter in pipe.parameters())


# Of what a loss is made

E = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("loss", "terms"),
    [
        (lambda e: e.mean(), [("mean", 15)]),
        (lambda e: e[e > 0.5].mean(0).mean(), [("mean", int((E > 0.5).sum()))]),
        (lambda e: e.mean(-1).mean(), [("mean", 3)]),
        (lambda e: (e.sum(-1) / (e > 0.5).sum(-1)).mean(), [("mean", 3)]),
        (lambda e: torch.stack([row[: n + 1].mean() for n, row in enumerate(e)]).mean(), [("mean", 3)]),
        (lambda e: sum(F.l1_loss(row[: n + 1], row[: n + 1] * 2) for n, row in enumerate(e)) / 3, [("sum", 3)]),
        (lambda e: F.mse_loss(e[:2], e[:2] * 2) + 0.5 * e.sum() / 7, [("mse_loss", 10), ("sum", 14)]),
        (lambda e: e.sum() * torch.tensor(0.37), [("sum", 1)]),
        (lambda e: e.sum() / 7 * e.detach().max() * e.sum().exp(), [("sum", 7)]),
        (lambda e: F.kl_div(e, e * 2, reduction="batchmean"), [("kl_div", 3)]),
        (lambda e: F.cross_entropy(e, torch.tensor([1, -100, 2])), [("cross_entropy", 2)]),
        (lambda e: F.cross_entropy(e, e.softmax(-1)), [("cross_entropy", 3)]),
        (lambda e: torch.ops.aten.div.Tensor(torch.ops.aten.mean.default(e), 2), [("mean", 30)]),
        (lambda e: e.sum() * 0.0, []),
    ],
)
def test_over_how_many_elements_a_loss_is_a_mean(loss: Callable[[Tensor], Tensor], terms: list[Any]) -> None:
    e = E.clone().requires_grad_()
    with Reductions() as seen:
        found = loss(e)
    assert [(each.name, round(each.number, 4)) for each in means_of(found, seen, 3).terms] == terms
