"""Losses that models return with their outputs: under a name, in a tuple, without labels, from labels as they are."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.test_own_loss import SIZES, check, make, token_batch, transformers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Small(nn.Module):
    """Returns (logits, loss or None), as small models on the web do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(idx)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Pairs(nn.Module):
    """Computes a loss of all pairs of a micro-batch, without labels, where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, return_loss: bool = False) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x).tanh()
        scores = x @ x.mT
        loss = F.cross_entropy(scores, torch.arange(x.shape[0]))
        return {"scores": scores, **({"loss": loss} if return_loss else {})}


pl.register_layout(Small, ["embedding", "layers.*"])
pl.register_layout(Pairs, ["layers.*"])


def double(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def tokens() -> dict[str, Tensor]:
    """Labels that count are spread unevenly over the samples."""
    generator = torch.Generator().manual_seed(4)
    found = {name: torch.randint(11, (6, 5), generator=generator) for name in ("idx", "targets")}
    found["targets"][0, 1:] = found["targets"][3, 2:] = -100
    return found


def schedule_of(num_microbatches: int) -> pl.Schedule:
    return pl.schedules.build("1f1b", num_ranks=2, num_microbatches=num_microbatches)


def equals(model: nn.Module, found: Tensor, pipe: pl.Pipeline, expected: Tensor) -> None:
    """The loss and gradients of a step are those of the model with this loss."""
    torch.testing.assert_close(found, expected.detach())
    gradients = dict(
        zip(dict(model.named_parameters()), torch.autograd.grad(expected, [*model.parameters()]), strict=True)
    )
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


@pytest.mark.parametrize("traced", [False, True])
def test_a_loss_in_a_tuple(traced):
    model, batch = double(Small), tokens()
    options = {"example": {name: t[:2] for name, t in batch.items()}, "cut": "parameters"} if traced else {}
    with pl.Pipeline(copy.deepcopy(model), schedule_of(3), **options) as pipe:
        equals(model, pipe.step(batch), pipe, model(**batch)[1])
    if traced:
        with (
            pl.Pipeline(copy.deepcopy(model), schedule_of(3), **options) as pipe,
            pytest.raises(InputError, match="targets are given, but the traced model returns its loss"),
        ):
            pipe.step(batch, batch["targets"])
        with (
            pl.Pipeline(model, schedule_of(3), **{**options, "example": batch["idx"][:2]}) as pipe,
            pytest.raises(InputError, match=r"step\(\) needs a loss.*example with its labels"),
        ):
            pipe.step(batch["idx"], batch["targets"])
    else:
        with pl.Pipeline(copy.deepcopy(model), schedule_of(3)) as pipe:
            equals(model, pipe.step(*batch.values()), pipe, model(**batch)[1])


@pytest.mark.parametrize("traced", [False, True])
def test_a_loss_without_labels(traced):
    """On two ranks; the one with the last stage counts the samples of its inputs."""
    model = double(Pairs)
    x = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    batch = {"x": x, "return_loss": True}
    options = {"example": {"x": x[:2], "return_loss": True}, "cut": "parameters"} if traced else {}
    expected = sum(model(part, return_loss=True)["loss"] * len(part) / 5 for part in x.split([3, 2]))

    with pl.Pipeline(copy.deepcopy(model), schedule_of(2), **options) as pipe:
        torch.testing.assert_close(pipe.evaluate(batch), expected.detach())
        equals(model, pipe.step(batch), pipe, expected)

    def step() -> float:
        with pl.Pipeline(copy.deepcopy(model), schedule_of(2), mesh=pl.Mesh(pp=2), **options) as pipe:
            return pipe.step(batch).item()

    assert pl.run_threads(2, step) == pytest.approx([expected.item()] * 2)

    def one_rank_without_inputs() -> None:
        with pl.Pipeline(copy.deepcopy(model), schedule_of(2), mesh=pl.Mesh(pp=2), **options) as pipe:
            pipe.step(batch if pipe.needs_inputs else None)

    with pytest.raises(pl.PipeloomError, match="targets=None: the rank with the last stage reads them"):
        pl.run_threads(2, one_rank_without_inputs)


def test_a_model_that_declares_results_without_a_loss_needs_a_loss_fn():
    batch = {"input_ids": token_batch()["input_ids"]}
    model = transformers.BertModel(transformers.BertConfig(**SIZES))
    with pl.Pipeline(model, schedule_of(2)) as pipe:
        for targets, said in ((None, "takes no labels and returns no loss"), (batch["input_ids"], "takes no labels")):
            with pytest.raises(InputError, match=f"BertModel {said}\\. Pass loss_fn"):
                pipe.step(batch, targets)
        with pytest.raises(InputError, match=r"BertModel takes no labels and returns no loss\. Pass loss_fn"):
            pipe.step({**batch, "labels": batch["input_ids"]})
        assert pipe.forward(batch).last_hidden_state.shape == (5, 9, 16)


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "BartForCausalLM"])
def test_labels_that_are_not_shifted_count_all(name):
    """Models whose class names suggest shifted labels, and which do not shift them."""
    if name.startswith("T5"):
        sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        batch = token_batch()
        batch["labels"][1, :4] = 5
        check(make(name, **{**sizes, "decoder_start_token_id": 0}), batch, m=3)
    else:
        sizes = {"d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24}
        pl.register_layout(transformers.BartForCausalLM, ["model.decoder.layers.*"])
        check(make(name, **sizes, dropout=0.0, max_position_embeddings=16), token_batch(), m=3)


def test_a_stream_of_a_model_with_its_own_loss():
    """Targets are read once, though the last stage and the loss both need them."""
    model, batch = make("LlamaForCausalLM"), token_batch()
    expected = model(**batch).loss.item()
    with pl.Pipeline(model, pl.schedules.build("pipedream", num_ranks=2, num_microbatches=4)) as pipe:
        updates = pl.Stream(pipe, torch.optim.SGD(pipe.parameters(), lr=0.0)).run([batch] * 4)
        assert [update.loss for update in updates] == pytest.approx([expected] * 4, rel=1e-5)


def test_a_check_keeps_no_cache():
    """Models of transformers return their keys and values unless they are told not to."""
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, "use_cache": True})
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(config).double()
    with pl.Pipeline(model, schedule_of(5), check=token_batch()) as pipe:
        assert pipe.step(token_batch()).isfinite()


class _TakesTargets(nn.Module):
    """The form of nanoGPT, with classes that the first layers read."""

    def __init__(self, ignored: int) -> None:
        super().__init__()
        self.ignored = ignored
        self.tokens, self.classes = nn.Embedding(7, 8), nn.Embedding(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, class_labels=None, targets=None):
        x = self.tokens(ids)
        if class_labels is not None:
            x = x + self.classes(class_labels)[:, None]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=self.ignored)


@pytest.mark.parametrize("ignored", [-100, -1])
def test_a_forward_with_targets_and_layers(ignored: int) -> None:
    """Labels are unevenly spread; all stages see them, since the forward may read them anywhere."""
    torch.manual_seed(0)
    model = _TakesTargets(ignored).double()
    ids, targets, classes = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5)), torch.tensor([0, 1, 2, 2, 1, 0])
    targets[0, 1:], targets[3] = ignored, ignored
    batch = {"ids": ids, "class_labels": classes}
    loss = model(**batch, targets=targets)[1]
    names = [name for name, _ in model.named_parameters()]
    wanted = dict(zip(names, torch.autograd.grad(loss, [*model.parameters()]), strict=True))
    layers = ["tokens", "classes", "blocks.*", "head"]
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=3)
    for arguments in (({**batch, "targets": targets},), (batch, targets)):
        with pl.Pipeline(copy.deepcopy(model), schedule, layers=layers) as pipe:
            assert abs(pipe.step(*arguments) - loss) < 1e-12
            for name, parameter in pipe.named_parameters():
                assert torch.allclose(parameter.grad, wanted[name], rtol=0, atol=1e-12), name
    with pl.Pipeline(model, schedule, layers=layers) as pipe, pytest.raises(InputError, match=r"'targets'\. Add them"):
        pipe.step({"ids": ids})


@pytest.mark.parametrize(("loss", "is_told"), [("mean", False), ("labels", True), ("sum", True), ("root", True)])
def test_a_loss_fn_that_returns_the_loss_of_the_model(loss: str, is_told: bool) -> None:
    """Its halves are not known; the forward shows of how many elements it is a mean."""

    class Model(_TakesTargets):
        def forward(self, ids, class_labels=None, targets=None):
            logits, found = super().forward(ids, class_labels, targets)
            if loss == "mean":
                return logits, F.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())
            return logits, {"labels": found, "sum": found * 0 + logits.square().sum(), "root": found.sqrt()}[loss]

    torch.manual_seed(0)
    model = Model(-100).double()
    ids, targets, classes = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5)), torch.tensor([0, 1, 2, 2, 1, 0])
    targets[0, 1:], targets[3] = -100, -100
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    options = {"layers": ["tokens", "classes", "blocks.*", "head"], "loss_fn": lambda o, t: o[1]}
    with warnings.catch_warnings(record=True) as told, pl.Pipeline(model, schedule, **options) as pipe:
        warnings.simplefilter("always")
        found = [pipe.step({"ids": ids, "class_labels": classes, "targets": targets}, targets) for _ in range(3)]
    wanted = model(ids, classes, targets)[1].detach()
    assert (abs(found[0] - wanted) > 1e-3) == is_told
    assert [str(each.message).partition(",")[0] for each in told] == [
        "loss_fn returns a loss that the model computed"
    ] * is_told


def test_labels_that_cannot_be_cut_or_are_given_twice() -> None:
    schedule, layers = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2), ["tokens", "blocks.*", "head"]
    model = _TakesTargets(-100)
    model.classes = None
    ids, targets = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5))
    with pl.Pipeline(model, schedule, layers=layers) as pipe:
        with pytest.raises(InputError, match=r"targets is a list of dicts: .*compute the loss in a loss_fn\.$"):
            pipe.step({"ids": ids, "targets": [{"boxes": targets[0]}] * 6})
        with pytest.raises(InputError, match=r"'targets' is in the batch, and other values of it are targets"):
            pipe.step({"ids": ids, "targets": targets}, targets.clamp(max=3))
        twice = pipe.step({"ids": ids, "targets": targets}, targets.clone())
        assert torch.equal(twice, pipe.step(ids, targets))
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    text = r"have 6 samples and targets 9: .* select in loss_fn\.$"
    with pl.Pipeline(parts, schedule, loss_fn=F.cross_entropy) as pipe, pytest.raises(InputError, match=text):
        pipe.step(torch.randn(6, 4), targets.flatten()[:9])


def test_a_forward_that_is_annotated_otherwise_may_return_a_loss() -> None:
    """As that of TimeSeriesTransformerForPrediction, whose arguments are no labels by their names."""
    one = torch.rand(6, 8, 1), torch.rand(6, 4, 1)
    batch = {"past_values": torch.rand(6, 8), "past_time_features": one[0], "past_observed_mask": torch.ones(6, 8)}
    batch |= {"future_values": torch.rand(6, 4), "future_time_features": one[1]}
    sizes = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=6, lags_sequence=[1, 2], num_time_features=1, d_model=8, **sizes,
        dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.TimeSeriesTransformerForPrediction(config).double()
    batch = {name: value.double() for name, value in batch.items()}
    wanted = model(**batch).loss.detach()
    with pl.Pipeline(model, schedule_of(2)) as pipe:
        torch.testing.assert_close(pipe.step(batch), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_contrastive_loss_without_labels_is_told_once(num_microbatches: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.blocks = nn.Embedding(7, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, ids, labels=None, return_loss=None):
            x = self.tokens(ids).mean(1)
            for block in self.blocks:
                x = torch.tanh(block(x))
            return {"loss": F.cross_entropy(x @ x.T, torch.arange(len(x)))} if return_loss else {"logits": x}

    model, ids = Model().double(), torch.randint(0, 7, (6, 5))
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=num_microbatches)
    with warnings.catch_warnings(record=True) as told, pl.Pipeline(model, schedule, layers=["tokens", "blocks.*"]) as p:
        warnings.simplefilter("always")
        found = [p.step({"ids": ids, "return_loss": True}) for _ in range(2)]
    texts = [str(each.message) for each in told]
    is_whole = num_microbatches == 1
    assert texts == [] if is_whole else ["return_loss=True: Model compares" in text for text in texts] == [True]
    assert torch.allclose(found[0], model(ids, return_loss=True)["loss"].detach(), rtol=1e-3) == is_whole


@pytest.mark.parametrize("shifts", [False, True])
def test_mean_over_labels_of_the_loss_of_the_model(shifts: bool) -> None:
    class Model(_TakesTargets):
        def forward(self, ids, class_labels=None, targets=None):
            logits, found = super().forward(ids, class_labels, targets)
            return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()) if shifts else found

    torch.manual_seed(0)
    model = Model(-100).double()
    ids, targets, classes = torch.randint(0, 7, (6, 5)), torch.randint(0, 7, (6, 5)), torch.tensor([0, 1, 2, 2, 1, 0])
    targets[0, 2:], targets[3], targets[4, 0] = -100, -100, -100
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=3)
    options = {"layers": ["tokens", "classes", "blocks.*", "head"]}
    options["loss_fn"] = pl.mean_over_labels(lambda output, labels: output[1])
    with warnings.catch_warnings(record=True) as told, pl.Pipeline(model, schedule, **options) as pipe:
        warnings.simplefilter("always")
        found = [pipe.step({"ids": ids, "class_labels": classes, "targets": targets}, targets) for _ in range(3)]
    assert (abs(found[0] - model(ids, classes, targets)[1].detach()) > 1e-6) == shifts
    texts = [str(each.message).partition(",")[0] for each in told]
    assert texts == ["mean_over_labels gets a loss that the model computed"] * shifts
