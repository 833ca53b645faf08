"""Hugging Face decoders on context-parallel ranks are the models in one process."""

from __future__ import annotations

import copy

import pytest
import torch

import pipeloom as pl
from pipeloom.transport.thread_members import run_threads
from tests.cpu.context_cases import S
from tests.cpu.pairwise import in_turn

FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gpt2": {},
}


@pytest.mark.parametrize(("family", "masks"), in_turn(FAMILIES, ["none", "padding", "documents"]))
def test_hugging_face_decoders(family, masks):
    pytest.importorskip("transformers", reason="transformers is not installed (the extra 'huggingface')")
    from pipeloom.models.huggingface import causal_lm_loss, causal_lm_targets
    from tests.cpu.test_huggingface import build, gradients, tokens

    ids = tokens(2, S)
    inputs = {"input_ids": ids}
    labels = ids
    if masks == "padding":
        inputs["attention_mask"] = (torch.arange(S) < torch.tensor([[S], [17]])).long()
        labels = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    if masks == "documents":  # transformers reads them from positions that start again
        inputs["position_ids"] = torch.cat([torch.arange(9), torch.arange(S - 9)]).expand(2, -1)
    targets = causal_lm_targets(labels)
    model = build(family, **FAMILIES[family])
    untrained = copy.deepcopy(model)  # made here, since threads share the random generator
    loss = causal_lm_loss(model(**inputs, use_cache=False).logits, targets)
    loss.backward()
    expected = gradients(model)

    def run() -> float:
        mesh = pl.Mesh(pp=2, cp=2)
        schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
        with pl.Pipeline(copy.deepcopy(untrained), schedule, loss_fn=causal_lm_loss, mesh=mesh) as pipe:
            found = pipe.step(inputs, targets)
            errors = [abs(float(found - loss.detach()))]
            for name, parameter in pipe.named_parameters():
                errors.append(float((parameter.grad - expected[name]).norm() / expected[name].norm()))
            return max(errors)

    assert max(run_threads(4, run)) < 1e-12
