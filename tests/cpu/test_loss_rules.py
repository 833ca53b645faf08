"""Models whose own loss is no mean over the labels that are not -100: the loss and gradients of the whole batch."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.devices.host import HostDevice
from pipeloom.engine.batch import Batch, moved
from pipeloom.training.losses.own_loss import OwnLoss

TIMES, CLASSES = 9, 7


def ctc(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    counted = labels > 0
    lengths = torch.full((len(logits),), TIMES)
    found = labels.masked_select(counted), lengths, counted.sum(-1)
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), *found, reduction=reduction)


def classes(logits: Tensor, labels: Tensor, **settings: object) -> Tensor:
    return F.cross_entropy(logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten(), **settings)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits[:, : labels.shape[1]].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    counted = labels >= 0
    return -((scores * counted).sum(-1) / counted.sum(-1)).mean()


LOSSES = {
    "ctc": lambda logits, labels: ctc(logits, labels, "mean"),
    "sums": lambda logits, labels: 0.5 * classes(logits, labels) + 0.1 * classes(logits * 2, labels),
    "sum": lambda logits, labels: ctc(logits, labels, "sum"),
    "another label": lambda logits, labels: classes(logits, labels.where(labels >= 0, 3), ignore_index=3),
    "samples": lambda logits, labels: F.mse_loss(logits[:, 0, 0], labels.sum(-1).double()),
    "sum over count": lambda logits, labels: classes(logits, labels, reduction="sum") / (labels != -100).sum(),
    "plain sum": lambda logits, labels: -(logits[:, : labels.shape[1]].log_softmax(-1)[..., 2] * (labels > 0)).sum(),
    "sum over all": lambda logits, labels: ctc(logits, labels, "sum") / labels.numel(),
    "own mask": lambda logits, labels: classes(logits, labels.masked_fill(labels == 5, -100)),
    "shifted": lambda logits, labels: classes(logits[:, :3], labels[:, 1:]),
    "by hand": by_hand,
    "unknown": lambda logits, labels: classes(logits, labels, reduction="none").square().sum().sqrt(),
    "two means": lambda logits, labels: classes(logits, labels) + F.mse_loss(logits[:, 0, 0], labels[:, 0].double()),
    "classes": lambda logits, labels: classes(logits, labels, weight=torch.arange(7.0).double()),
}


class Model(nn.Module):
    """Returns its loss in a dict; a name in the model says which label does not count."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, CLASSES)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.name = name
        if name == "another label":
            self.loss = nn.CrossEntropyLoss(ignore_index=3)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits} if labels is None else {"logits": logits, "loss": LOSSES[self.name](logits, labels)}


class Positions(Model):
    """Answers whose positions may lie outside of the text: these do not count."""

    def forward(self, ids: Tensor, start_positions: Tensor | None = None, end_positions: Tensor | None = None):
        logits = super().forward(ids)["logits"]
        losses = [
            F.cross_entropy(logits[..., k], each.clamp(0, TIMES), ignore_index=TIMES)
            for k, each in enumerate((start_positions, end_positions))
        ]
        return {"loss": (losses[0] + losses[1]) / 2, "logits": logits}


class Predicts(Model):
    """Takes no labels: its loss is that of another input."""

    def forward(self, ids: Tensor, future_values: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)["logits"]
        return {"loss": F.mse_loss(logits[..., 0], future_values), "logits": logits}


for kind in (Model, Positions, Predicts):
    pl.register_layout(kind, ["embedding", "layers.*"])


def batch_of() -> dict[str, Tensor]:
    """From 1 to 4 labels per sample."""
    generator = torch.Generator().manual_seed(4)
    ids, labels = torch.randint(11, (6, TIMES), generator=generator), torch.randint(1, 7, (6, 4), generator=generator)
    for sample, number in enumerate((1, 2, 3, 4, 4, 4)):
        labels[sample, number:] = -100
    return {"ids": ids, "labels": labels}


def make(name: str, kind: type[Model] = Model) -> Model:
    torch.manual_seed(3)
    return kind(name).double()


def step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    with pl.Pipeline(copy.deepcopy(model), schedule) as pipe:
        pipe.evaluate(batch)
        return pipe.step(batch), {name: p.grad for name, p in pipe.named_parameters()}


@pytest.mark.parametrize(
    "name", ["ctc", "sum", "sums", "another label", "samples", "sum over count", "plain sum", "by hand"]
)
def test_the_loss_is_that_of_the_whole_batch(name: str) -> None:
    model, batch = make(name), batch_of()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, gradients = step(model, batch)
    loss = model(**batch)["loss"]
    torch.testing.assert_close(found, loss.detach())
    loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, msg=key)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("unknown", "from other functions: the pipeline cannot tell"),
        ("two means", r"from a mse_loss \(mean\) and a cross_entropy \(mean over 3 of 8 labels\): the pipeline cannot"),
        ("classes", r"from a cross_entropy \(weighted mean over 3 of 8 labels\)"),
    ],
)
def test_what_cannot_be_known_is_told(name: str, seen: str) -> None:
    with pytest.warns(UserWarning, match=seen) as found:
        step(make(name), batch_of())
    assert len(found) == 1


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("classes", r"from a cross_entropy \(weighted mean over 8 of 8 labels\)"),
        ("own mask", r"from a cross_entropy \(mean over 7 of 8 labels\)"),
        ("sum over all", r"from a ctc_loss \(sum\) and a sum with a factor"),
    ],
)
def test_even_labels_do_not_hide_another_mean(name: str, seen: str) -> None:
    batch = batch_of()
    batch["labels"] = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5], [1, 5, 5, 6], [1, 2, 3, 4], [6, 2, 3, 4], [1, 2, 6, 4]])
    with pytest.warns(UserWarning, match=seen) as found:
        step(make(name), batch)
    assert len(found) == 1


def test_a_micro_batch_without_labels_teaches_nothing() -> None:
    """It comes first; its mean would not be a number, and both counts of labels are 0."""
    model, batch = make("shifted"), batch_of()
    batch["labels"][:2] = -100
    found, gradients = step(model, batch)
    loss = model(**batch)["loss"]
    torch.testing.assert_close(found, loss.detach())
    loss.backward()
    torch.testing.assert_close(gradients["head.weight"], model.head.weight.grad)


def test_a_batch_without_labels_that_count_is_told_once() -> None:
    batch = {**batch_of(), "labels": torch.full((6, 4), -100)}
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    with pl.Pipeline(make("sum over count"), schedule) as pipe:
        with pytest.warns(UserWarning, match="no label of the batch counts, all are negative ones: the loss is 0"):
            assert pipe.step(batch) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pipe.step(batch) == 0
        assert all(not parameter.grad.any() for parameter in pipe.parameters())


def test_labels_that_are_even_in_a_replica_may_be_uneven_over_all() -> None:
    own = OwnLoss(make("ctc"))
    targets = [{"labels": torch.tensor([[1, 2], [3, 4]])}]
    batch = Batch(targets=targets, sizes=[2], weights=[0.5], all_samples=4)
    own.weigh(batch, targets, (6, 3))  # another replica has one label per sample
    assert not batch.targets[0].is_even
    batch = Batch(targets=targets, sizes=[2], weights=[0.5], all_samples=4)
    own.weigh(batch, targets, (8, 4))
    assert batch.targets[0].is_even


def test_positions_outside_of_the_text_are_told() -> None:
    """They may come in a later batch."""
    ids = batch_of()["ids"]
    inside = {"ids": ids, "start_positions": torch.arange(6), "end_positions": torch.arange(6) + 3}
    outside = {**inside, "end_positions": torch.arange(6) + 4}
    model = make("", Positions)
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    with pl.Pipeline(copy.deepcopy(model), schedule) as pipe:
        torch.testing.assert_close(pipe.step(inside), model(**inside)["loss"].detach())
        with pytest.warns(UserWarning, match=r"cross_entropy \(mean over 1 of 2 labels\)"):
            pipe.step(outside)


def test_a_model_without_labels_needs_none() -> None:
    model, ids = make("", Predicts), batch_of()["ids"]
    batch = {"ids": ids[:5], "future_values": ids[:5].double()}
    torch.testing.assert_close(step(model, batch)[0], model(**batch)["loss"].detach())


def test_weights_of_labels_stay_when_a_batch_moves() -> None:
    batch = Batch(targets=[{"labels": torch.tensor([[1, 2]])}], weights=[1.0])
    own = OwnLoss(make("ctc"))
    own.weigh(batch, batch.targets, own.count(batch.targets))
    found = moved(batch.targets[0], HostDevice(torch.device("cpu")))
    assert (type(found), found.counts) == (type(batch.targets[0]), (2, 1))
