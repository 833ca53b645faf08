"""Hugging Face decoders in pipelines along the sequence: gradients are those of the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import islice, product

import pytest
import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.ir import check
from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
from tests.cpu.pairwise import pairwise
from tests.cpu.ranks import run_ranks
from tests.cpu.test_huggingface import DROPOUT, FAMILIES, LENGTH, assert_same, build, gradients, tokens

UNEVEN = {2: [33, 8], 3: [1, 24, 16], 4: [20, 1, 1, 19], 5: [9, 1, 10, 13, 8], 6: [2, 3, 5, 7, 11, 13]}
UNEVEN[7] = [12, 8, 6, 5, 4, 4, 2]
CUTS = [(k, lengths) for k in range(1, 8) for lengths in (None, UNEVEN.get(k)) if k > 1 or lengths is None]


@cache
def model_of(kind: str, recompute: str | None = None, dropout: bool = False):
    """Built once; copies train. Llama has four query heads on two of keys, GPT-2 tied embeddings."""
    changes = {"tie_word_embeddings": kind == "gpt2"} | (DROPOUT[kind] if dropout else {})
    return build(kind, recompute, **changes)


@cache
def expected_of(kind: str, samples: int) -> tuple[Tensor, dict[str, Tensor]]:
    model, x = deepcopy(model_of(kind)), tokens(samples)
    loss = causal_lm_loss(model(x, use_cache=False).logits, causal_lm_targets(x))
    loss.backward()
    return loss.detach(), gradients(model)


def run(schedule, model, samples: int, lengths: list[int] | None, transport: str):
    """Loss and gradients of this process's stages."""
    model, x = deepcopy(model), tokens(samples)
    with pl.Pipeline(model, schedule, loss_fn=causal_lm_loss, transport=transport, slices=lengths) as pipe:
        loss = pipe.step(x, causal_lm_targets(x))
        assert all(check(schedule).live_activations[r] == live for r, live in pipe.memory.peak_live_activations.items())
        assert not any(pipe.memory.live_activations.values())
        return loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}


def cases(kind: str, ranks: int):
    """Every schedule, number of slices, even and uneven, and batch; with and without recomputation in turn."""
    index = 0
    for name in ("terapipe", "seq1f1b"):
        for num_slices, lengths in CUTS:
            for samples in (1, 2, 3):
                index += 1
                schedule = pl.schedules.build(
                    name, num_ranks=ranks, num_microbatches=1 + index % samples, num_slices=num_slices
                )
                yield schedule, samples, lengths, "recompute" if index % 3 == 0 else None


def assert_trains(kind: str, transport: str, schedule, samples, lengths, recompute) -> None:
    expected_loss, expected = expected_of(kind, samples)
    loss, found = run(schedule, model_of(kind, recompute), samples, lengths, transport)
    assert loss is None or abs(loss - expected_loss) <= 1e-12 * expected_loss
    assert found
    assert transport != "loopback" or found.keys() == expected.keys()
    assert_same(found, {name: expected[name] for name in found})


def assert_all_train(kind: str, ranks: int, transport: str, part: slice = slice(None)) -> None:
    for case in islice(cases(kind, ranks), part.start, part.stop, part.step):
        assert_trains(kind, transport, *case)


FACTORS = product((1, 2, 4), ("terapipe", "seq1f1b"), range(1, 8), (False, True), (1, 2, 3), (None, "recompute"))
PAIRS = pairwise([case for case in FACTORS if case[2] > 1 or not case[3]])


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_of_any_slices_in_one_process(kind):
    """Any two values of two factors: ranks, schedules, slices and so on; with one family or the other."""
    for index, (ranks, name, num_slices, uneven, samples, recompute) in enumerate(PAIRS):
        if FAMILIES[index % 2] != kind:
            continue
        sizes = {"num_ranks": ranks, "num_microbatches": 1 + index % samples, "num_slices": num_slices}
        lengths = UNEVEN[num_slices] if uneven else None
        assert_trains(kind, "loopback", pl.schedules.build(name, **sizes), samples, lengths, recompute)


@pytest.mark.whole_grid
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_of_all_slices_in_one_process(kind, ranks):
    assert_all_train(kind, ranks, "loopback")


def several(rank: int, ranks: int, part: slice, kinds: Sequence[str]) -> None:
    for kind in kinds:
        assert_all_train(kind, ranks, "torch", part)


@pytest.mark.parametrize(("ranks", "kind"), [(2, "llama"), (4, "gpt2")])
def test_gradients_of_any_slices_in_processes(ranks, kind):
    run_ranks(several, ranks, ranks, slice(ranks, None, 20), [kind])


@pytest.mark.whole_grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))  # connections of closed pipelines stay, and new ones take ever longer
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradients_of_all_slices_in_processes(ranks, kind, part):
    run_ranks(several, ranks, ranks, slice(part, None, 4), [kind], timeout_seconds=500)


def masks_do_not_depend_on_slices(ranks: int, transport: str, kinds: Sequence[str]) -> None:
    for kind in kinds:
        found = []
        for name, lengths, recompute in (
            ("1f1b", [LENGTH], None),
            ("terapipe", UNEVEN[3], None),
            ("seq1f1b", UNEVEN[5], "recompute"),
            ("terapipe", UNEVEN[6], "recompute"),
            ("seq1f1b", UNEVEN[7], None),
        ):
            sliced = {"num_slices": len(lengths)} if len(lengths) > 1 else {}
            schedule = pl.schedules.build(name, num_ranks=ranks, num_microbatches=2, **sliced)
            model = model_of(kind, recompute, dropout=True)  # which draws its weights
            torch.manual_seed(5)
            found.append(run(schedule, model, 3, lengths, transport))
        (loss, expected), *others = found
        for other_loss, other in others:
            assert loss is None or abs(loss - other_loss) <= 1e-12 * loss
            assert_same(other, expected, 1e-11)
        whole = expected_of(kind, 3)[1]
        assert any(not torch.allclose(gradient, whole[name]) for name, gradient in expected.items())


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        pytest.param(ranks, kind, marks=() if kind == FAMILIES[turn % 2] else pytest.mark.whole_grid)
        for (turn, ranks), kind in product(enumerate((1, 2, 4)), FAMILIES)
    ],
)
def test_masks_of_dropout_in_one_process(ranks, kind):
    masks_do_not_depend_on_slices(ranks, "loopback", [kind])


def dropped(rank: int, ranks: int) -> None:
    masks_do_not_depend_on_slices(ranks, "torch", ["gpt2"])  # whose masks are of embeddings and results too


def test_masks_of_dropout_in_processes():
    run_ranks(dropped, 2, 2)
