"""Pipelines along the sequence: gradients, memory and masks are those of whole sequences."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError, StageError
from pipeloom.ir import check
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.slicing.context import SliceContext
from tests.cpu.pairwise import pairwise
from tests.cpu.ranks import run_ranks

LENGTH, VOCABULARY = 22, 17


def make_model(*, dropout: float = 0.0, positions: str = "rotary", dtype: torch.dtype = torch.float64) -> GPT:
    config = GPTConfig(
        vocabulary_size=VOCABULARY,
        layers=4,
        width=16,
        heads=2,
        sequence_length=LENGTH,
        tie_embeddings=positions == "learned",
        positions=positions,  # type: ignore[arg-type]
        dropout=dropout,
    )
    model = GPT(config)
    init_parameters(model, seed=0)
    return model.to(dtype)


def make_batch(samples: int, length: int = LENGTH, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (samples, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def reference(samples: int, positions: str = "rotary", length: int = LENGTH) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(positions=positions)
    inputs, targets = make_batch(samples, length)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def uneven(num_slices: int) -> list[int]:
    """Lengths that grow by one and end with what is left."""
    first = list(range(1, num_slices))
    return [*first, LENGTH - sum(first)]


def assert_close(pipe: pl.Pipeline, loss: Tensor, expected: tuple[Tensor, dict[str, Tensor]], times: int = 1) -> None:
    assert abs(loss - expected[0]) < 1e-12
    seen = set()
    for name, parameter in pipe.named_parameters():
        gradient = times * expected[1][name]
        assert (parameter.grad - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name
        seen.add(name)
    assert seen


@pytest.mark.usefixtures("new_objects_alone")
def test_what_slices_keep_for_the_next_goes_with_the_last_slice() -> None:
    kept = []

    def watched(output: Tensor, target: Tensor) -> Tensor:
        kept.append(sum(type(each) is SliceContext for each in gc.get_objects()))
        return loss_fn(output, target)

    schedule = pl.schedules.build("seq1f1b", num_ranks=1, num_microbatches=4, num_slices=2)
    with pl.Pipeline(make_model(), schedule, loss_fn=watched) as pipe:
        pipe.evaluate(*make_batch(4))
    assert max(kept) <= 1, "of one micro-batch at most"


def train_sliced(rank: int | None, ranks: int, transport: str, case: tuple[str, int, int, int, bool, str]) -> None:
    name, samples, num_microbatches, num_slices, is_uneven, positions = case
    schedule = pl.schedules.build(name, num_ranks=ranks, num_microbatches=num_microbatches, num_slices=num_slices)
    lengths = uneven(num_slices) if is_uneven else None
    inputs, targets = make_batch(samples)
    expected = reference(samples, positions)
    with pl.Pipeline(
        make_model(positions=positions), schedule, loss_fn=loss_fn, transport=transport, slices=lengths
    ) as pipe:
        assert_close(pipe, pipe.step(inputs, targets), expected)
        assert abs(pipe.evaluate(inputs, targets) - expected[0]) < 1e-12
        assert_close(pipe, pipe.step(inputs, targets), expected, times=2)
        predicted = check(schedule).live_activations
        assert all(predicted[r] == live for r, live in pipe.memory.peak_live_activations.items())
        assert not any(pipe.memory.live_activations.values())
        output = pipe.forward(inputs)
        if output is not None:
            torch.testing.assert_close(output, make_model(positions=positions)(inputs), rtol=1e-12, atol=1e-12)


CASES = [
    (name, samples, num_microbatches, num_slices, is_uneven, positions)
    for index, (name, num_slices, is_uneven, samples) in enumerate(
        product(("terapipe", "seq1f1b"), range(1, 8), (False, True), (1, 2, 3))
    )
    if num_slices > 1 or not is_uneven
    for num_microbatches in [1 + index % samples]
    for positions in [("rotary", "learned")[index // 2 % 2]]
]


PAIRS = pairwise([(ranks, *case) for ranks in (1, 2, 4) for case in CASES])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loopback(ranks: int) -> None:
    """Any two values of two factors, of which the number of ranks is one."""
    for case in (case for number, *case in PAIRS if number == ranks):
        train_sliced(None, ranks, "loopback", tuple(case))


@pytest.mark.whole_grid
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loopback_with_every_case(ranks: int) -> None:
    for case in CASES:
        train_sliced(None, ranks, "loopback", case)


def run_cases(rank: int, ranks: int, transport: str, part: slice) -> None:
    for case in CASES[part]:
        train_sliced(rank, ranks, transport, case)


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [pytest.param(2, "torch", marks=pytest.mark.whole_grid), (4, "torch"), (2, "shared-memory")],
)
def test_processes(ranks: int, transport: str) -> None:
    run_ranks(run_cases, ranks, ranks, transport, slice(ranks, None, 13))


@pytest.mark.whole_grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_slices_in_processes(ranks: int) -> None:
    run_ranks(run_cases, ranks, ranks, "torch", slice(None), timeout_seconds=500)


def test_threads_and_chunks() -> None:
    train_sliced(None, 2, "threads", ("seq1f1b", 2, 2, 4, True, "rotary"))
    schedule = pl.schedules.build("seq1f1b-interleaved", num_ranks=2, num_microbatches=2, num_slices=2, num_chunks=2)
    with pl.Pipeline(make_model(), schedule, loss_fn=loss_fn, transport="loopback", slices=[13, 9]) as pipe:
        assert_close(pipe, pipe.step(*make_batch(2)), reference(2))
        assert pipe.memory.peak_live_activations == dict(enumerate(check(schedule).live_activations))


def test_sequences_of_other_lengths_are_cut_in_proportion() -> None:
    schedule = pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=1, num_slices=3)
    for lengths in (None, [2, 4, 16]):
        with pl.Pipeline(make_model(), schedule, loss_fn=loss_fn, transport="loopback", slices=lengths) as pipe:
            for length in (LENGTH, 9, 3):
                pipe_loss = pipe.step(*make_batch(2, length))
                assert_close(pipe, pipe_loss, reference(2, length=length))
                for parameter in pipe.parameters():
                    parameter.grad = None
            with pytest.raises(InputError, match="a sequence of 2 tokens for 3 slices"):
                pipe.step(*make_batch(1, 2))
            with pytest.raises(InputError, match="sequences of 9 tokens and targets of 8"):
                pipe.step(make_batch(1, 9)[0], make_batch(1, 8)[1])
            assert_close(pipe, pipe.step(*make_batch(2)), reference(2))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_masks_of_dropout_do_not_depend_on_the_slices(checkpointed: bool) -> None:
    found = []
    for name, lengths in (("1f1b", [LENGTH]), ("terapipe", [5, 17]), ("seq1f1b", uneven(6))):
        schedule = pl.schedules.build(
            name, num_ranks=2, num_microbatches=2, num_slices=len(lengths) if len(lengths) > 1 else 1
        )
        model = make_model(dropout=0.3)
        if checkpointed:
            for block in model.blocks:
                checkpoint_block(block)
        torch.manual_seed(5)
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback", slices=lengths) as pipe:
            losses = [pipe.step(*make_batch(4)) for _ in range(2)]
            found.append((losses, {n: p.grad for n, p in pipe.named_parameters()}))
    (losses, gradients), *others = found
    assert losses[0] != losses[1], "every step draws anew"
    for other_losses, other_gradients in others:
        assert torch.allclose(torch.stack(losses), torch.stack(other_losses), rtol=1e-12)
        for name, gradient in gradients.items():
            assert (other_gradients[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max()


def checkpoint_block(block: nn.Module) -> None:
    forward = block.forward

    def recomputed(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    block.forward = recomputed  # type: ignore[method-assign]


class RawAttention(nn.Module):
    sliceable = True  # it is not: only its first slice is right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x[:, None]
        return x + nn.functional.scaled_dot_product_attention(heads, heads, value=heads, is_causal=True)[:, 0]


def test_attention_to_one_slice_alone_is_refused() -> None:
    schedule = pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=1, num_slices=3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), RawAttention()), nn.Linear(4, 4))
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, transport="loopback") as pipe:
        inputs = torch.randn(2, 8, 4)
        with pytest.raises(
            StageError,
            match=r"RawAttention\) calls F.scaled_dot_product_attention .* Use pipeloom.slicing.causal_attention",
        ):
            pipe.step(inputs, inputs)


def test_what_cannot_be_sliced_is_refused_by_name() -> None:
    schedule = pl.schedules.build("terapipe", num_ranks=2, num_microbatches=1, num_slices=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"Conv1d.*convolution along the sequence"):
        pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, transport="loopback")
    for lengths, words in (
        ([1, 2, 3], "3 lengths"),
        ([4, 0], "at least one"),
        (2, "slices=2:"),
        ("4,4", "a list"),
    ):
        with pytest.raises(InputError, match=words):
            pl.Pipeline(make_model(), schedule, loss_fn=loss_fn, transport="loopback", slices=lengths)
    with pl.Pipeline(make_model(), schedule, loss_fn=loss_fn, transport="loopback") as pipe:
        inputs, targets = make_batch(2)
        with pytest.raises(InputError, match="no tensor of two dimensions"):
            pipe.step(inputs[:, 0], targets)
