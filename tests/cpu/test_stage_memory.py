"""Parameters and activations of processes that share a stage: what each holds equals the forecast, for every layout."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.autograd.recomputation import recomputed
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.context import ContextParallel
from pipeloom.plan.memory import gpt_layers, num_parameters
from pipeloom.split import split
from tests.cpu.pairwise import pairwise
from tests.cpu.test_stage_traffic import CASES, on_mesh, shared

LENGTH, VOCABULARY, SAMPLES = 48, 70, 4


def build(*, grouped: bool) -> tuple[GPTConfig, GPT]:
    config = GPTConfig(
        vocabulary_size=VOCABULARY,
        layers=3,
        width=96,
        heads=4,
        kv_heads=2 if grouped else None,
        sequence_length=LENGTH,
        tie_embeddings=False,
        positions="learned",
    )
    model = GPT(config)
    init_parameters(model, seed=0)
    return config, model


def _cases() -> list[Any]:
    """Any two values of two factors; layouts on more ranks than they need run in whole grids."""
    needed = [name for name in CASES if " of " not in name]
    others = (Recompute, (False, True), (torch.float32, torch.bfloat16))
    chosen = pairwise([*product(needed, *others)])
    return [
        pytest.param(*case, marks=() if case in chosen else pytest.mark.whole_grid) for case in product(CASES, *others)
    ]


@pytest.mark.parametrize(("name", "recompute", "grouped", "dtype"), _cases(), ids=str)
def test_each_process_keeps_what_the_forecast_says(
    name: str, recompute: Recompute, grouped: bool, dtype: torch.dtype
) -> None:
    inside = CASES[name]

    def work(mesh: pl.Mesh) -> None:
        config, whole = build(grouped=grouped)
        model = shared(whole.to(dtype), mesh, inside)
        layers = gpt_layers(config, SAMPLES, dtype.itemsize, inside)
        assert num_parameters(layers) == sum(parameter.numel() for parameter in model.parameters())
        (stage,) = split(model, 1).modules
        inputs = torch.zeros(SAMPLES, LENGTH, dtype=torch.uint8)
        targets = torch.zeros(SAMPLES, LENGTH, dtype=torch.uint8)
        kept = SavedBytes.beyond(stage)
        context = ContextParallel(mesh.axis("cp"), inside.context_kind) if inside.context > 1 else None
        with nullcontext() if context is None else context.tokens({"length": LENGTH}).current():
            if context is not None:
                inputs, targets = context.cut(inputs), context.cut(targets)
            with kept.counting():
                output = recomputed(stage, recompute)(inputs)
                loss = loss_fn(output.float(), targets)
        assert kept.now == sum(layer.kept_bytes[recompute] for layer in layers)
        del loss

    on_mesh(inside, work)
