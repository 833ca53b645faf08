"""Own losses of a model whose functions do not show how micro-batches combine: halves of their samples do."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import pipeloom as pl
from tests.cpu.pairwise import in_turn

LAYERS = ["first", "blocks.*", "head"]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Returns its loss of logits, labels and weights of the samples."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.loss, self.calls = loss, 0

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits = self.head(x)
        return {"loss": self.loss(logits, labels, weights), "logits": logits}


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


OTHERS: dict[str, Loss] = {
    "normalized weights": lambda y, t, w: torch.dot(each(y, t), w / w.sum()),
    "einsum": lambda y, t, w: torch.einsum("b,b->", each(y, t), F.normalize(w, p=1, dim=0)),
    "softmax of weights": lambda y, t, w: (each(y, t) * w.softmax(0)).sum(),
    "weights of mean 1": lambda y, t, w: (each(y, t) * (w / w.mean())).mean(),
    "frequencies": lambda y, t, w: (each(y, t) / torch.bincount(t, minlength=4)[t]).sum(),
    "nanmean": lambda y, t, w: torch.where(w > 0.5, each(y, t), torch.nan).nanmean(),
    "norm": lambda y, t, w: torch.linalg.vector_norm(y),
    "largest": lambda y, t, w: each(y, t).max(),
}
MEANS: dict[str, Loss] = {
    "weighted mean": lambda y, t, w: (each(y, t) * w).mean(),
    "einsum over samples": lambda y, t, w: torch.einsum("b,b->", each(y, t), w) / len(y),
    "mean of norms": lambda y, t, w: torch.linalg.vector_norm(y, dim=1).mean(),
    "mean of largest": lambda y, t, w: y.max(1).values.mean(),
}


def batch_of(num_samples: int = 10) -> dict[str, Tensor]:
    torch.manual_seed(2)
    labels, weights = torch.arange(num_samples) % 2, torch.rand(num_samples).double()
    weights[::2] += 0.5  # in every half of a micro-batch
    return {"x": torch.randn(num_samples, 5).double(), "labels": labels, "weights": weights}


def make(loss: Loss) -> Model:
    torch.manual_seed(3)
    return Model(loss).double()


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_is_told_once(name: str) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    with pl.Pipeline(make(OTHERS[name]), schedule, layers=LAYERS) as pipe:
        with pytest.warns(
            UserWarning, match=r"for 3 samples, .* for their halves\): the pipeline cannot tell"
        ) as found:
            pipe.step(batch_of())
        assert len(found) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(batch_of())


def test_a_loss_that_compares_samples_is_told() -> None:
    model = make(lambda y, t, w: F.cross_entropy(y @ y.detach().T, torch.arange(len(y))))
    batch = batch_of()
    batch["labels"] = batch["labels"][:, None].repeat(1, 3)
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    text = "and samples that depend on each other"
    with pl.Pipeline(model, schedule, layers=LAYERS) as pipe, pytest.warns(UserWarning, match=text):
        pipe.step(batch)


GRADIENTS: dict[str, Loss] = {
    "over its value": lambda y, t, w: F.cross_entropy(y, t) / F.cross_entropy(y, t).detach(),
    "balanced": lambda y, t, w: F.cross_entropy(y, t) + balance(F.smooth_l1_loss(y, 0 * y), F.cross_entropy(y, t)),
}


def balance(one: Tensor, other: Tensor) -> Tensor:
    """One loss, scaled to the value of another."""
    return one * (other / one).detach()


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_loss_whose_gradients_alone_depend_on_other_samples_is_told(name: str) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    text = "whose gradients depend on other samples: the pipeline cannot tell"
    with pl.Pipeline(make(GRADIENTS[name]), schedule, layers=LAYERS) as pipe, pytest.warns(UserWarning, match=text):
        pipe.step(batch_of())


def test_a_loss_that_compares_each_sample_with_the_others_is_told() -> None:
    model = make(lambda y, t, w: F.cross_entropy(y @ y.detach().T, torch.arange(len(y))))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    text = "samples that depend on each other"
    with pl.Pipeline(model, schedule, layers=LAYERS) as pipe, pytest.warns(UserWarning, match=text):
        pipe.step(batch_of())


@pytest.mark.parametrize(("name", "schedule"), in_turn(MEANS, ["1f1b", "zb-v"]))
def test_means_over_samples_are_not_told(name: str, schedule: str) -> None:
    model, batch = make(MEANS[name]), batch_of()
    built = pl.schedules.build(schedule, num_ranks=2, num_microbatches=4)
    twin = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pl.Pipeline(twin, built, layers=LAYERS, transport="threads") as pipe:
            state = torch.get_rng_state()
            found = pipe.step(batch)
            assert torch.equal(torch.get_rng_state(), state)
            loss = model(**batch)["loss"]
            loss.backward()
            torch.testing.assert_close(found, loss.detach())
            gradients = {key: p.grad for key, p in pipe.named_parameters()}
            for key, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[key], parameter.grad, msg=key)
            assert {stage.whole_model.calls for stage in pipe.state.stages.values()} == {4}  # as without halves


def test_a_loss_that_autograd_grad_does_not_run_is_not_asked() -> None:
    model = make(lambda y, t, w: checkpoint(lambda y: F.cross_entropy(y, t), y, use_reentrant=True))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    with pl.Pipeline(copy.deepcopy(model), schedule, layers=LAYERS) as pipe:
        found = pipe.step(batch_of())
        gradients = {key: p.grad for key, p in pipe.named_parameters()}
    loss = model(**batch_of())["loss"]
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[key], parameter.grad, msg=key)


def test_layers_that_draw_are_not_asked() -> None:
    model = make(OTHERS["norm"])
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pl.Pipeline(model, schedule, layers=LAYERS) as pipe:
            assert pipe.step(batch_of()) > 0


def test_a_traced_model_is_told() -> None:
    batch = batch_of()
    example = {name: value[:3] for name, value in batch.items()}
    model, schedule = (
        Traced(OTHERS["softmax of weights"]).double(),
        pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4),
    )
    with pl.Pipeline(model, schedule, example=example) as pipe, pytest.warns(UserWarning, match="for their halves"):
        pipe.step(batch)


class Traced(Model):
    def forward(self, x: Tensor, labels: Tensor, weights: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.blocks[1](self.blocks[0](self.first(x)).tanh()))
        return {"loss": self.loss(logits, labels, weights), "logits": logits}


def test_stages_of_a_mesh_are_not_asked() -> None:
    """Their forwards may exchange messages, and all processes would have to ask alike."""
    schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=4)
    with pl.Pipeline(make(OTHERS["norm"]), schedule, layers=LAYERS) as pipe:
        assert pipe.executor.batching.loss_fn.compare_halves is not None

    def replica() -> bool:
        with pl.Pipeline(make(OTHERS["norm"]), schedule, layers=LAYERS, mesh=pl.Mesh(pp=1, dp=2)) as pipe:
            return pipe.executor.batching.loss_fn.compare_halves is None

    assert pl.run_threads(2, replica) == [True, True]
