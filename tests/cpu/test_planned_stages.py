"""Stages that run the forward of transformers' models: they compute what the model does, or refuse."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")

from tests.cpu.huggingface_families import PARTS, SCHEDULES, batch, compared, difference, family, reference, small_model

# Families that differ in what passes between their layers, each with a number of ranks and a schedule.
PAIRWISE = [
    ("llama", 3, "zb-h1"),
    ("phi", 2, "1f1b"),  # dropout between embedding and layers
    ("gemma3n_text", 3, "1f1b"),  # inputs per layer, hidden states of four dimensions, keys of earlier layers
    ("gemma4_text", 2, "zb-v"),  # keys and values of other layers
    ("qwen3_moe", 2, "interleaved"),
    ("deepseek_v4", 3, "zb-h1"),  # several streams of hidden states
    ("qwen3_next", 2, "zb-h1"),  # linear attention
    ("t5gemma2_text", 3, "zb-v"),  # a base model
]


@pytest.mark.parametrize(("kind", "ranks", "schedule"), PAIRWISE, ids=str)
def test_a_family_trains_as_its_model_trains_itself(kind, ranks, schedule):
    """Loss and gradients of accumulation over the same micro-batches, in float64."""
    if family(kind) is None:
        pytest.skip(f"this version of transformers has no {kind} with a pipeline plan")
    model, inputs = small_model(kind), batch(7)
    assert difference(model, inputs, reference(model, inputs), ranks, schedule) <= 1e-12


@pytest.mark.whole_grid
@pytest.mark.parametrize("part", range(PARTS))
def test_every_family(part):
    for kind in compared(part):
        model, inputs = small_model(kind), batch(7)
        expected = reference(model, inputs)
        for ranks in (2, 3):
            for schedule in SCHEDULES:
                assert difference(model, inputs, expected, ranks, schedule) <= 1e-12, (kind, ranks, schedule)


def test_the_walk_notices_wrong_gradients():
    """The comparison is relative to each gradient, so an omitted factor anywhere is seen."""
    model, inputs = small_model("llama"), batch(7)
    loss, gradients = reference(model, inputs)
    name = "model.layers.3.self_attn.q_proj.weight"
    gradients[name] = gradients[name] * (1 + 1e-9)
    assert difference(model, inputs, (loss, gradients), 2, "1f1b") > 1e-10
    assert torch.is_grad_enabled()
