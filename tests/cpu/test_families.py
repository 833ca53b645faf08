"""Sizes of Hugging Face configurations: parameters beside those of the models that transformers builds."""

import pytest
import torch

from pipeloom.errors import InputError
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.huggingface_config import architecture_of

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 512}
LLAMA = {**SMALL, "intermediate_size": 640, "num_key_value_heads": 4}
MOE = {**LLAMA, "moe_intermediate_size": 96, "num_experts_per_tok": 2, "head_dim": 32}
CASES = {
    "apertus": LLAMA,
    "bitnet": LLAMA,
    "bloom": SMALL,
    "cohere": LLAMA,
    "dots1": {**MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
              "topk_group": 1, "norm_topk_prob": True},
    "ernie4_5_moe": {**MOE, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
                     "moe_layer_end_index": 3},
    "falcon": {**SMALL, "new_decoder_architecture": False, "multi_query": True, "activation": "gelu"},
    "gemma": {**LLAMA, "head_dim": 32},
    "glm4_moe": {**MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2, "n_group": 1,
                 "topk_group": 1},
    "gpt2": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 512, "n_positions": 64},
    "gpt_bigcode": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 512, "n_positions": 64},
    "gpt_neo": {"hidden_size": 256, "num_layers": 4, "num_heads": 8, "vocab_size": 512, "max_position_embeddings": 64,
                "attention_types": [[["global", "local"], 2]]},
    "gpt_neox": {**SMALL, "intermediate_size": 1024},
    "gptj": {"n_embd": 256, "n_layer": 4, "n_head": 8, "vocab_size": 512, "rotary_dim": 32},
    "llama": LLAMA,
    "llama4_text": {**LLAMA, "intermediate_size": 128, "intermediate_size_mlp": 640, "num_local_experts": 4,
                    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "head_dim": 32},
    "mistral": {**LLAMA, "head_dim": 32},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    "mpt": {"d_model": 256, "n_layers": 4, "n_heads": 8, "vocab_size": 512, "expansion_ratio": 4},
    "nemotron": {**LLAMA, "head_dim": 32},
    "opt": {**SMALL, "ffn_dim": 1024, "word_embed_proj_dim": 256, "max_position_embeddings": 64},
    "phi3": {**LLAMA, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    "qwen2": LLAMA,
    "qwen2_moe": {**MOE, "num_experts": 8, "shared_expert_intermediate_size": 192, "decoder_sparse_step": 1,
                  "mlp_only_layers": []},
    "qwen3_moe": {**MOE, "num_experts": 8, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "starcoder2": {**LLAMA, "intermediate_size": 1024, "use_bias": True},
    "xglm": {"d_model": 256, "num_layers": 4, "attention_heads": 8, "ffn_dim": 1024, "vocab_size": 512},
}  # fmt: skip


@pytest.mark.parametrize("family", CASES)
def test_a_model_has_the_parameters_that_its_configuration_says(family: str) -> None:
    config = transformers.CONFIG_MAPPING[family](**CASES[family])
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    model = architecture_of(config.to_dict(), "config.json")
    costs = CostModel(model=model, cluster=find_cluster("dgx-a100-80", "--cluster"))
    assert sum(costs.parameters(Configuration())) == pytest.approx(
        sum(each.numel() for each in built.parameters()), rel=0.01
    )


@pytest.mark.parametrize("family", ["bamba", "deepseek_v3", "falcon_h1", "jamba", "lfm2", "recurrent_gemma", "zamba2"])
def test_a_model_with_other_layers_is_refused(family: str) -> None:
    """Whatever the file has: it may leave out the keys of these layers."""
    for content in (transformers.CONFIG_MAPPING[family]().to_dict(), {"model_type": family, **LLAMA}):
        with pytest.raises(InputError, match=r"layers of kind .*, which are not predicted"):
            architecture_of(content, "config.json")
