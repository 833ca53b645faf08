"""`Pipeline.generate` gives the tokens of the model's own generation."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import make_gpt

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
SLIDING = {"sliding_window": 6}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "gpt2": {"n_layer": 6},
    "mistral": SLIDING,
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "phi3": {},
    "mixtral": MIXTURE,
    "qwen3_moe": MIXTURE,
    "qwen3_next": MIXTURE,  # linear attention: no cache of keys and values in most layers
}
SCHEDULES = [("1f1b", 2, 4), ("gpipe", 3, 2), ("zb-v", 2, 3), ("interleaved", 3, 3)]


@cache
def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | FAMILIES[kind])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _prompts(samples: int = 5, *, padded: bool = True) -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (samples, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :3] = mask[3, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _ending(model: Any) -> int:
    """A token that ends the first sequence early, and no other at once."""
    return int(model.generate(**_prompts(), max_new_tokens=4, do_sample=False)[0, 9])


GREEDY = {"do_sample": False, "max_new_tokens": 8}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.2, "max_new_tokens": 6}


def _expected(model: Any, prompts: dict[str, Tensor], **settings: Any) -> Tensor:
    torch.manual_seed(5)
    found: Tensor = model.generate(**prompts, **settings)
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_tokens_are_those_of_the_models_own_generate(kind: str) -> None:
    name, num_ranks, count = SCHEDULES[list(FAMILIES).index(kind) % len(SCHEDULES)]
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=count)
    model, prompts = _model(kind), _prompts(padded=kind != "gemma2")
    with pl.Pipeline(copy.deepcopy(model), schedule, transport="loopback") as pipe:
        for settings in (GREEDY, GREEDY | {"eos_token_id": _ending(model)}, SAMPLED):
            found = pipe.generate(prompts, seed=5, **settings)
            assert torch.equal(found, _expected(model, prompts, **settings)), settings
