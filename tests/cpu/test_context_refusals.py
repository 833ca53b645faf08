"""What context parallelism does not support is refused in one line, which says what would fit."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, StageError
from pipeloom.models import loss_fn
from pipeloom.parallel.context import KINDS
from pipeloom.transport.thread_members import run_threads
from tests.cpu.context_cases import S, batch, make_both, make_gpt


def refused(degrees: dict[str, int], *, model=None, family="1f1b", length: int = S, inputs=None, **options) -> str:
    def run() -> None:
        mesh = pl.Mesh(**degrees)
        num_slices = 2 if family == "seq1f1b" else 1
        schedule = pl.schedules.build(family, num_ranks=mesh.degree("pp"), num_microbatches=4, num_slices=num_slices)
        chosen = make_gpt() if model is None else model()
        with pl.Pipeline(chosen, schedule, loss_fn=loss_fn, mesh=mesh, **options) as pipe:
            x, y = (value[:, :length] for value in batch())
            pipe.step(x if inputs is None else inputs(x), y)

    with pytest.raises((InputError, StageError)) as caught:
        run_threads(math.prod(degrees.values()), run)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_lengths_that_cannot_be_divided_are_refused():
    said = refused({"cp": 2}, length=22)
    assert (
        said
        == "sequences of 22 tokens for cp=2 with context 'ring': must be a multiple of 4. Pad or cut them to 20 or 24."
    )
    assert "multiple of 2. Pad or cut them to 20 or 22." in refused({"cp": 2}, length=21, context="ring-plain")
    assert "sequences of 3 tokens" in refused({"cp": 2}, length=3)


def test_heads_that_cannot_be_divided_are_refused():
    said = refused({"cp": 3}, context="ulysses")
    assert "attention with 4 query heads and 4 key heads on cp=3" in said
    assert "Use cp=1, 2 or 4, or context='ring'." in said


def test_what_context_parallelism_does_not_support_is_refused():
    assert "dropout of attention weights with probability 0.1" in refused(
        {"cp": 2}, model=partial(make_gpt, dropout=0.1)
    )
    assert "slices with context parallelism (cp=2)" in refused({"pp": 2, "cp": 2}, family="seq1f1b")
    assert "slices with context parallelism (cp=2)" in refused({"cp": 2}, slices=[24])
    assert "context parallelism needs a synchronous schedule" in refused({"pp": 2, "cp": 2}, family="pipedream")
    assert "context='rings': must be one of ring, ring-plain" in refused({"cp": 2}, context="rings")
    assert "'attention_mask' of type int: context parallelism needs a tensor" in refused(
        {"cp": 2}, inputs=lambda x: {"input_ids": x, "attention_mask": 1}
    )
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
    with pytest.raises(InputError, match=r"^context='ring' needs a mesh with an axis cp"):
        pl.Pipeline(make_gpt(), schedule, context="ring")


def test_ranks_with_other_batches_or_another_context_are_told():
    def other_lengths() -> None:
        mesh = pl.Mesh(cp=2)
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=4)
        with pl.Pipeline(make_gpt(), schedule, loss_fn=loss_fn, mesh=mesh) as pipe:
            pipe.step(*(value[:, : S - 8 * mesh.coordinate("cp")] for value in batch()))

    with pytest.raises(
        InputError, match=r"inputs are int64 \[samples, 24\] on rank 0 and int64 \[samples, 16\] on rank 1"
    ):
        run_threads(2, other_lengths)

    def other_context() -> None:
        mesh = pl.Mesh(cp=2)
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=4)
        kind = KINDS[mesh.coordinate("cp")]
        pl.Pipeline(make_gpt(), schedule, loss_fn=loss_fn, mesh=mesh, context=kind)

    with pytest.raises(InputError, match=r"differ in their context parallelism.* Pass the same `context` on each"):
        run_threads(2, other_context)


class Raw(nn.Module):
    sliceable = True

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


def test_models_that_mix_tokens_by_themselves_are_refused():
    def with_module(part: nn.Module) -> nn.Sequential:
        model = make_both()
        model[1] = part
        return model

    said = refused({"cp": 2}, model=lambda: with_module(Raw()))
    assert "module '1' (Raw) calls F.scaled_dot_product_attention on the tokens of one context-parallel rank" in said
    norm = nn.BatchNorm1d(S, dtype=torch.float64)
    assert "normalises over several tokens, so its result on parts of a sequence" in refused(
        {"cp": 2}, model=lambda: with_module(norm)
    )
