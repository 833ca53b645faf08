"""Losses over labels that are spread unevenly over micro-batches, slices and replicas."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.autograd.loss_metrics import counts_of_labels
from pipeloom.errors import InputError
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from pipeloom.training.losses import watched_loss
from pipeloom.training.losses.watched_loss import WatchedLoss
from tests.cpu.pairwise import in_turn

F64 = torch.float64
WORDS = 7


torch.manual_seed(0)
_MODEL = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WORDS)).to(F64)


def make_model() -> nn.Sequential:
    return copy.deepcopy(_MODEL)  # threads share a generator


@cache
def batch() -> tuple[Tensor, Tensor]:
    """10 samples of 8 tokens. Of 4 micro-batches the last has no label, and so has a slice of others."""
    generator = torch.Generator().manual_seed(1)
    words, labels = (torch.randint(1, WORDS, (10, 8), generator=generator) for _ in range(2))
    labels[0, 3:] = labels[1, :5] = labels[8:] = -100
    labels[5] = -100
    return words, labels


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def with_metrics(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    right = (logits.argmax(-1) == labels)[labels != -100]
    return {"loss": mean(logits, labels), "accuracy": right.double().mean(), "labels": pl.Sum((labels != -100).sum())}


@cache
def expected(*, shift: bool = False) -> tuple[Tensor, dict[str, Tensor], float]:
    """Of the whole batch at once."""
    model, (words, labels) = make_model(), batch()
    if shift:
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    found = with_metrics(model(words), labels)
    found["loss"].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found["loss"].detach(), gradients, float(found["accuracy"])


def compare(pipe: pl.Pipeline, inputs: Tensor, labels: Any, *, shift: bool = False) -> None:
    loss, gradients, accuracy = expected(shift=shift)
    for run in (pipe.evaluate, pipe.step):
        torch.testing.assert_close(run(inputs, labels), loss, rtol=1e-12, atol=0)
        if pipe.metrics():
            assert pipe.metrics()["accuracy"] == pytest.approx(accuracy, rel=1e-12)
    for name, parameter in pipe.named_parameters():
        wanted = gradients[name]
        if name in pipe.state.ranges:
            start, stop, _ = pipe.state.ranges[name]
            wanted = wanted.flatten()[start:stop]
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=1e-15)


def schedule_of(name: str, **sizes: int) -> pl.Schedule:
    return pl.schedules.build(name, **{"num_ranks": 2, "num_microbatches": 5, **sizes})


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("1f1b", {}, {"transport": "threads"}),
        ("zb-h1", {"num_microbatches": 10}, {"recompute": "full"}),
        ("seq1f1b", {"num_slices": 4}, {}),
        ("dualpipev", {}, {}),
    ],
)
def test_the_mean_over_labels_is_that_of_the_batch(name: str, sizes: dict[str, int], options: dict[str, Any]) -> None:
    loss_fn = pl.mean_over_labels(with_metrics)
    with pl.Pipeline(make_model(), schedule_of(name, **sizes), loss_fn=loss_fn, **options) as pipe:
        compare(pipe, *batch())
    shifting = pl.mean_over_labels(mean, shift=True)
    with pl.Pipeline(make_model(), schedule_of(name, **sizes), loss_fn=shifting, **options) as pipe:
        compare(pipe, *batch(), shift=True)
    words, labels = batch()
    assert torch.equal(loss_fn(make_model()(words), labels)["loss"], expected()[0])  # outside of a pipeline


def lm_with_metrics(logits: Tensor, targets: dict[str, Tensor]) -> dict[str, Any]:
    return {"loss": causal_lm_loss(logits, targets), "labels": pl.Sum((targets["labels"] != -100).sum())}


@pytest.mark.parametrize(
    ("loss_fn", "targets", "options"),
    [
        (pl.mean_over_labels(with_metrics), lambda labels: labels, {"data": "zero3"}),
        (pl.mean_over_labels(lambda o, t: mean(o, t["labels"]), shift=True), lambda labels: {"labels": labels}, {}),
        (causal_lm_loss, causal_lm_targets, {}),
        (causal_lm_loss, lambda labels: labels, {"data": "zero1"}),
        (lm_with_metrics, causal_lm_targets, {}),
    ],
)
def test_replicas_with_different_numbers_of_labels(loss_fn: Any, targets: Callable[..., Any], options: Any) -> None:
    words, labels = batch()
    parts = [(words[:7], labels[:7]), (words[7:], labels[7:])]
    shift = targets is causal_lm_targets or loss_fn is causal_lm_loss or getattr(loss_fn, "_shift", False)

    def work() -> None:
        with (
            pl.Mesh(pp=2, dp=2) as mesh,
            pl.Pipeline(
                make_model(), schedule_of("1f1b", num_microbatches=3), loss_fn=loss_fn, mesh=mesh, **options
            ) as pipe,
        ):
            inputs, own = parts[mesh.coordinate("dp")]
            loss, gradients, _ = expected(shift=shift)
            assert pipe.step(inputs, targets(own)).item() == pytest.approx(loss.item(), rel=1e-12)
            if loss_fn is lm_with_metrics:
                assert pipe.metrics() == {"labels": float((labels[:, 1:] != -100).sum())}
            if "data" not in options:
                for name, parameter in pipe.named_parameters():
                    torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)

    pl.run_threads(4, work, timeout_seconds=120)


def test_context_parallel_ranks() -> None:
    def work() -> None:
        with (
            pl.Mesh(pp=2, cp=2) as mesh,
            pl.Pipeline(
                make_model(), schedule_of("1f1b"), loss_fn=pl.mean_over_labels(mean, shift=True), mesh=mesh
            ) as pipe,
        ):
            compare(pipe, *batch(), shift=True)

    pl.run_threads(4, work, timeout_seconds=120)


def test_streams_weigh_labels() -> None:
    with pl.Pipeline(
        make_model(), schedule_of("pipedream-2bw", num_microbatches=4), loss_fn=pl.mean_over_labels(with_metrics)
    ) as pipe:
        updates = pl.Stream(pipe, torch.optim.SGD(pipe.parameters(), lr=0.0)).run([batch(), batch()])
    loss, _, accuracy = expected()
    assert [update.loss for update in updates] == pytest.approx([loss.item()] * 2, rel=1e-12)
    assert updates[1].metrics == pytest.approx({"accuracy": accuracy, "labels": float((batch()[1] != -100).sum())})


def own_labels(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    return mean(logits, targets["labels"])


def told_once(pipe: pl.Pipeline, inputs: Any, targets: Any, fix: str) -> None:
    with pytest.warns(UserWarning, match="the pipeline trains the mean of their means") as told:
        assert pipe.step(inputs, targets).isfinite()
    (text,) = [str(each.message) for each in told]
    assert text.endswith(f"pass loss_fn=pipeloom.mean_over_labels(loss_fn{fix}).")
    assert "\n" not in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pipe.step(inputs, targets).isfinite()
        assert pipe.evaluate(inputs, targets).isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in pipe.parameters())


@pytest.mark.parametrize(("kind", "num_slices"), in_turn(["tensor", "dict", "key", "metrics"], [1, 4]))
def test_a_mean_of_means_is_told_once_and_is_a_number(kind: str, num_slices: int) -> None:
    words, labels = batch()
    key: Any = lambda o, t: mean(o, t["ids"])  # noqa: E731
    loss_fn = {
        "tensor": mean,
        "dict": own_labels,
        "key": key,
        "metrics": lambda o, t: {"loss": mean(o, t) + 0.5, "x": 1.0},
    }[kind]
    schedule = schedule_of("seq1f1b", num_slices=num_slices) if num_slices > 1 else schedule_of("zb-h1")
    with pl.Pipeline(make_model(), schedule, loss_fn=loss_fn) as pipe:
        given = {"labels": labels, "ids": labels} if kind == "dict" else {"ids": labels} if kind == "key" else labels
        told_once(pipe, words, given, ", counts=lambda targets: targets['ids'] != -100" if kind == "key" else "")
    if kind == "key":
        loss_fn = pl.mean_over_labels(key, counts=lambda targets: targets["ids"] != -100)
        with pl.Pipeline(make_model(), schedule, loss_fn=loss_fn) as pipe:
            compare(pipe, words, {"ids": labels})


@pytest.mark.parametrize("loss_fn", [mean, pl.mean_over_labels(mean)])
def test_a_batch_without_labels_that_count_is_told(loss_fn: Any) -> None:
    words, labels = batch()[0], torch.full_like(batch()[1], -100)
    with pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=loss_fn) as pipe:
        with pytest.warns(UserWarning, match="no label of the batch counts, all are -100: the loss is 0"):
            assert pipe.step(words, labels) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pipe.step(words, labels) == 0


@pytest.mark.parametrize("loss_fn", [partial(F.cross_entropy, ignore_index=0), nn.CrossEntropyLoss(ignore_index=0)])
def test_another_label_that_does_not_count(loss_fn: Any) -> None:
    labels = torch.tensor([3, 0, 2, 5, 0, 0, 1, 2, 3, 4])
    with pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=loss_fn) as pipe:
        told_once(pipe, batch()[0][:, 0], labels, ", ignore_index=0")


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum") / t.numel(),
        pl.mean_over_labels(mean),
        causal_lm_loss,
        lambda o, t: o.mean(),
    ],
)
def test_other_losses_are_not_warned_of(loss_fn: Any) -> None:
    with warnings.catch_warnings(), pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=loss_fn) as pipe:
        warnings.simplefilter("error")
        pipe.step(*batch())


def test_equal_numbers_of_labels_are_not_warned_of_and_losses_are_soon_called_once() -> None:
    calls = []

    def counting(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(len(labels))
        return mean(logits, labels)

    words, labels = batch()
    labels = labels.clone().clamp(min=1)
    labels[:, 3] = -100
    with warnings.catch_warnings(), pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=counting) as pipe:
        warnings.simplefilter("error")
        found = pipe.step(words, labels)
        assert calls == [2, 2, 4, 4, 2, 2] * 2 + [2]  # the first ones also in pairs, and with gradients
        calls.clear()
        pipe.step(words, labels)
    torch.testing.assert_close(found, mean(make_model()(words), labels).detach(), rtol=1e-12, atol=0)
    assert calls == [2] * 5


W = torch.linspace(0.1, 2.0, WORDS, dtype=F64)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=W)


@pytest.mark.parametrize("num_microbatches", [2, 5])
@pytest.mark.parametrize(
    "loss_fn",
    [
        weighted,
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"),
        lambda o, t: F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="none").mean(),
    ],
)
def test_another_loss_in_mean_over_labels_is_told_once(loss_fn: Any, num_microbatches: int) -> None:
    schedule = schedule_of("1f1b", num_microbatches=num_microbatches)
    text = "mean_over_labels gets a loss_fn that is no mean over the labels that count"
    with (
        pl.Pipeline(make_model(), schedule, loss_fn=pl.mean_over_labels(loss_fn)) as pipe,
        pytest.warns(UserWarning, match=text) as told,
    ):
        found = [pipe.step(*batch()) for _ in range(3)]
    assert len(told) == 1
    assert str(told[0].message).endswith("such as counts=lambda targets: w[targets] for class weights w.")
    wanted = loss_fn(make_model()(batch()[0]), batch()[1]).detach()
    assert abs(found[0] / wanted - 1) > 1e-5  # so it is to be told


@pytest.mark.parametrize("num_microbatches", [2, 5])
def test_class_weights_as_counts(num_microbatches: int) -> None:
    counts = lambda t: torch.where(t < 0, 0.0, W[t.clamp(min=0)])  # noqa: E731
    model, schedule = make_model(), schedule_of("1f1b", num_microbatches=num_microbatches)
    wanted = weighted(model(batch()[0]), batch()[1])
    gradients = torch.autograd.grad(wanted, [*model.parameters()])
    loss_fn = pl.mean_over_labels(weighted, counts=counts)
    with warnings.catch_warnings(), pl.Pipeline(model, schedule, loss_fn=loss_fn) as pipe:
        warnings.simplefilter("error")
        torch.testing.assert_close(pipe.step(*batch()), wanted.detach(), rtol=1e-12, atol=0)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-15)


def overlap(logits: Tensor, labels: Tensor) -> Tensor:
    chosen, wanted = logits.softmax(-1)[..., 1], labels == 1
    return 1 - 2 * (chosen * wanted).sum() / (chosen.sum() + wanted.sum())


def test_a_mean_over_labels_beside_another_loss_is_told() -> None:
    with pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=lambda o, t: mean(o, t) + overlap(o, t)) as pipe:
        with pytest.warns(UserWarning, match="loss_fn is neither a mean nor a sum over samples") as told:
            pipe.step(*batch())
        assert len(told) == 1


def test_wrong_arguments_are_one_line() -> None:
    with pytest.raises(InputError, match="loss_fn='mean': must be a function"):
        pl.mean_over_labels("mean")
    with pytest.raises(InputError, match=r"ignore_index=0\.5: must be an integer"):
        pl.mean_over_labels(mean, ignore_index=0.5)
    with pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=pl.mean_over_labels(mean)) as pipe:
        for wrong, seen in ((torch.randn(10, 8), "are tensor"), ({"ids": batch()[1]}, "are a dict with 'ids'")):
            with pytest.raises(InputError, match=f"mean_over_labels: the targets {seen}"):
                pipe.step(batch()[0], wrong)
        pipe.step(*batch())


def test_where_the_host_would_wait_labels_are_counted_in_the_first_batches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, labels = batch()
    found, num_counts = [], []
    for is_asynchronous in (False, True):
        counted = []
        monkeypatch.setattr(watched_loss, "counts_of_labels", lambda *of: counted.append(of) or counts_of_labels(*of))  # noqa: B023
        pipe = pl.Pipeline(make_model(), schedule_of("1f1b"), loss_fn=mean)
        assert isinstance(pipe.executor.batching.loss_fn, WatchedLoss)
        pipe.executor.batching.loss_fn._left = 2 if is_asynchronous else math.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a mean of means
            found.append([pipe.step(words, labels) for _ in range(4)])
        found[-1] += [parameter.grad for parameter in pipe.parameters()]
        num_counts.append(len(counted))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
    assert num_counts == [8, 4]  # the batch, and its micro-batches
