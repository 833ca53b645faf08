"""Hooks that collect outputs inside a model of transformers: a split adds none before a forward asks for outputs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from pipeloom.split import split

IDS = torch.arange(12).reshape(2, 6)


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


def _hidden_states(stages: list[nn.Module], **settings: bool) -> tuple[torch.Tensor, ...] | None:
    value = {"input_ids": IDS, **settings}
    for stage in stages:
        value = stage(value)
    return value.hidden_states


@pytest.mark.parametrize("kept", ["model", "stages", "copied stages"])
def test_outputs_are_collected_once_they_are_asked_for(kept):
    model = _model()
    expected = copy.deepcopy(model)(IDS, output_hidden_states=True, use_cache=False).hidden_states
    stages = split(model, 2).modules
    assert not any(part._forward_hooks for part in model.modules())
    if kept != "model":
        del model
        gc.collect()
    stages = copy.deepcopy(stages) if kept == "copied stages" else stages
    assert _hidden_states(stages) is None
    for _ in range(2):
        found = _hidden_states(stages, output_hidden_states=True)
        assert len(found) == len(expected) == 5
        assert all(map(torch.equal, found, expected))
    if kept == "model":  # which has the hooks now, once
        again = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
        assert len(again) == len(expected)
        assert all(map(torch.equal, again, expected))
    assert _hidden_states(stages) is None


def test_a_model_that_has_the_hooks_keeps_them():
    model = _model()
    model(IDS, output_hidden_states=True)
    hooks = {name: list(part._forward_hooks) for name, part in model.named_modules() if part._forward_hooks}
    stages = split(model, 2).modules
    assert hooks == {name: list(part._forward_hooks) for name, part in model.named_modules() if part._forward_hooks}
    assert len(_hidden_states(stages, output_hidden_states=True)) == 5
