"""Recomputation changes what is kept between forward and backward, and no number."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.errors import InputError, RunError
from pipeloom.models import GPT, GPTConfig, init_parameters
from tests.cpu.pairwise import in_turn
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_mlp, tokens

KINDS = ("none", "selective", "full")
SCHEDULES = {
    "1f1b": {},
    "interleaved": {"num_chunks": 2},
    "zb-h1": {},
    "zb-v": {},
    "dualpipev": {},
    "seq1f1b": {"num_slices": 3},
}


def _gpt(*, tied: bool = False, dropout: float = 0.0, layers: int = 4) -> GPT:
    config = GPTConfig(
        vocabulary_size=32, layers=layers, width=16, heads=2, sequence_length=12, tie_embeddings=tied, dropout=dropout
    )
    model = GPT(config)
    init_parameters(model, seed=5)
    return model


def _train(
    model, name: str, recompute, *, transport: str = "loopback", loss_fn=language_loss, batches=None, **sizes
) -> tuple[list[Tensor], dict[str, Tensor], dict[int, int]]:
    """Losses of two steps and the gradients after both."""
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4, **sizes)
    torch.manual_seed(3)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, recompute=recompute, transport=transport) as pipe:
        losses = [pipe.step(*(batches or tokens)(8, seed=step)) for step in range(2)]
        live = pl.check(schedule).live_activations
        assert pipe.memory.peak_live_activations == {rank: live[rank] for rank in pipe.executor.local_ranks}
        return losses, {name: p.grad for name, p in pipe.named_parameters()}, pipe.memory.peak_live_activations


def _assert_same(one, other) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


@pytest.mark.parametrize(("name", "dropout"), in_turn(SCHEDULES, [0.0, 0.3]))
def test_gradients_are_bitwise_those_without(name: str, dropout: float) -> None:
    sizes = SCHEDULES[name]
    expected = _train(_gpt(tied=True, dropout=dropout), name, "none", **sizes)
    for kind in ("selective", "full"):
        _assert_same(_train(_gpt(tied=True, dropout=dropout), name, kind, **sizes), expected)


class Counting(nn.Module):
    """Counts how often a layer runs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm, self.calls = nn.Linear(width, width), nn.LayerNorm(width), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.norm(self.linear(x)).tanh()


def _vectors(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 8, generator=generator), torch.randn(batch, 8, generator=generator)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_each_stage_has_its_own_word_and_recomputes_every_block_once(name: str) -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[Counting(8) for _ in range(4)])

    expected = _train(build(), name, "none", loss_fn=F.mse_loss, batches=_vectors)
    model = build()
    _assert_same(_train(model, name, ["full", "none"], loss_fn=F.mse_loss, batches=_vectors), expected)
    assert [layer.calls for layer in model] == [16, 16, 8, 8]  # two steps of four micro-batches


def _saved_bytes(model: nn.Module, name: str, recompute, batches=tokens, loss_fn=language_loss) -> int:
    """The most bytes that autograd keeps at once of one step, each storage once, parameters aside."""
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, recompute=recompute, transport="loopback") as pipe:
        pipe.step(*batches(8))
        kept = SavedBytes(model.parameters())
        with kept.counting():
            pipe.step(*batches(8))
    return kept.peak


def test_what_is_kept_between_forward_and_backward_falls() -> None:
    """Under full recomputation a block keeps its input: B x S x W floats, and one block is whole at a time."""
    kept = {kind: _saved_bytes(_gpt(layers=8), "gpipe", kind) for kind in KINDS}
    assert kept["full"] < kept["selective"] <= kept["none"]
    few = _saved_bytes(_gpt(layers=4), "gpipe", "full")
    block_input = 2 * 12 * 16 * 4  # samples of a micro-batch, tokens, width, bytes
    assert kept["full"] - few == 4 * 4 * block_input  # four blocks more, four micro-batches


def test_attention_keeps_no_weights_under_selective_recomputation() -> None:
    """With dropout torch's attention keeps its softmax, samples x heads x tokens x tokens, and the mask of it."""
    kept = {kind: _saved_bytes(_gpt(dropout=0.1), "gpipe", kind) for kind in ("none", "selective")}
    softmax = 2 * 2 * 12 * 12 * 4
    assert kept["none"] - kept["selective"] >= 4 * 4 * softmax  # blocks, micro-batches


class Encoder(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(*[nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True) for _ in range(4)])


def _sequences(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 5, 8, generator=generator), torch.randn(batch, 5, 8, generator=generator)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_layers_of_torch(kind: str) -> None:
    expected = _train(Encoder(), "zb-h1", "none", loss_fn=F.mse_loss, batches=_sequences)
    _assert_same(_train(Encoder(), "zb-h1", kind, loss_fn=F.mse_loss, batches=_sequences), expected)


def _odd() -> nn.Sequential:
    """Layers of one module, of which two work in place, and running statistics."""
    torch.manual_seed(2)
    block = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8)]
    return nn.Sequential(*block, nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Tanh())


@pytest.mark.parametrize("given", [False, True])
def test_running_statistics_and_modules_that_work_in_place(given: bool) -> None:
    def build() -> list[nn.Module] | nn.Sequential:
        model = _odd()
        return [model[:4], model[4:]] if given else model

    results = []
    for kind in ("none", "full"):
        model = build()
        results.append(_train(model, "1f1b", kind, loss_fn=F.mse_loss, batches=_vectors))
        results[-1][1].update({name: b for part in model for name, b in part.named_buffers() if b.is_floating_point()})
    _assert_same(*results)


def test_autocast() -> None:
    def train(kind: str):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _train(_gpt(dropout=0.1), "zb-h1", kind)

    for kind in ("selective", "full"):
        _assert_same(train(kind), train("none"))


def _stream(kind: str, weights: str) -> dict[str, Tensor]:
    schedule = pl.schedules.build(
        "pipedream", num_ranks=2, num_microbatches=4, microbatches_per_update=1, weights=weights
    )
    model = _gpt(dropout=0.1)
    torch.manual_seed(7)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, recompute=kind, transport="loopback") as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5, momentum=0.9)
        pl.Stream(pipe, optimizer).run([tokens(2, seed=step) for step in range(8)])
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("weights", ["stash", "vertical"])
def test_a_stream_recomputes_under_the_version_of_the_forward(weights: str) -> None:
    expected = _stream("none", weights)
    for kind in ("selective", "full"):
        found = _stream(kind, weights)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def _rank(rank: int, kind: str):
    losses, gradients, _ = _train(_gpt(dropout=0.0, tied=True), "zb-v", kind, transport="torch")
    return [loss.item() for loss in losses], {name: g.numpy() for name, g in gradients.items()}


def test_in_processes() -> None:
    expected, found = (run_ranks(_rank, 2, kind) for kind in ("none", "full"))
    for (losses, gradients), (other_losses, others) in zip(expected, found, strict=True):
        assert losses == other_losses
        assert all((gradients[name] == others[name]).all() for name in gradients)


def test_hugging_face_decoders() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2
    )

    def build():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)

    def loss_fn(output, targets):
        return language_loss(output.logits, targets)

    expected = _train(build(), "zb-h1", "none", loss_fn=loss_fn)
    for kind in ("selective", "full"):
        _assert_same(_train(build(), "zb-h1", kind, loss_fn=loss_fn), expected)
    expected = _train(build(), "seq1f1b", "none", loss_fn=loss_fn, num_slices=2)
    for kind in ("selective", "full"):
        _assert_same(_train(build(), "seq1f1b", kind, loss_fn=loss_fn, num_slices=2), expected)


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ("some", "none, selective, full"),
        (["full"], r"recompute=\['full'\]: a list needs one value per stage, and there are 2"),
        ("full,none,full", "has 3 values for 2 stages"),
        (3, "recompute=3: must be none"),
    ],
)
def test_words_that_mean_nothing_are_refused(recompute, words: str) -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    with pytest.raises(InputError, match=words):
        pl.Pipeline(make_mlp(), schedule, loss_fn=F.mse_loss, recompute=recompute, transport="loopback")
    with pytest.raises(InputError, match="threads"):
        pl.Pipeline(make_mlp(), schedule, loss_fn=F.mse_loss, recompute="full", transport="threads")


def test_a_module_without_attention_is_named() -> None:
    with pytest.raises(RunError, match=r"module '0' \(Counting\) calls no attention") as caught:
        _train(nn.Sequential(Counting(8), Counting(8)), "1f1b", "selective", loss_fn=F.mse_loss, batches=_vectors)
    assert "\n" not in str(caught.value)


def test_a_module_whose_forward_changes_what_it_begins_with_is_named() -> None:
    class Moving(Counting):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("mean", torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.add_(x.detach().mean(0))
            return super().forward(x) - self.mean

    with pytest.raises(RunError, match="changes its buffer 'mean'"):
        _train(nn.Sequential(Moving(8), Moving(8)), "1f1b", "full", loss_fn=F.mse_loss, batches=_vectors)


@pytest.mark.parametrize("draw", [random.random, np.random.randn])
def test_python_and_numpy_draw_the_numbers_of_the_forward_again(draw) -> None:
    class Drops(Counting):
        def forward(self, x: Tensor) -> Tensor:
            scale = draw()
            return x if scale < 0.3 else super().forward(x * scale)

    found = []
    for kind in ("none", "full"):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        model = nn.Sequential(*(Drops(8) for _ in range(4)))
        found.append(_train(model, "zb-h1", kind, loss_fn=F.mse_loss, batches=_vectors))
    _assert_same(*found)

    def in_threads() -> None:
        schedule, model = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2), nn.Sequential(Drops(8), Drops(8))
        with pl.Mesh(pp=2) as mesh:
            pipe = pl.Pipeline(model, schedule, loss_fn=F.mse_loss, recompute="full", mesh=mesh)
            pipe.step(*_vectors(4))

    with pytest.raises(RunError, match=r"module '[01]' \(Drops\), or another thread meanwhile, draws from Python's"):
        pl.run_threads(2, in_threads)


def test_a_stage_that_surely_has_no_attention_is_refused_when_the_pipeline_is_made() -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=2, num_microbatches=2)
    model = nn.Sequential(Counting(8), nn.Linear(8, 8))
    for recompute in ("selective", ["none", "selective"]):
        with pytest.raises(InputError, match="recompute='selective' for stage 1: the stage has no attention"):
            pl.Pipeline(model, schedule, loss_fn=F.mse_loss, recompute=recompute, transport="loopback")
    other = nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True))
    pl.Pipeline(other, schedule, loss_fn=F.mse_loss, recompute=["none", "selective"], transport="loopback").close()
