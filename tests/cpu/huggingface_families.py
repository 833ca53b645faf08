"""Every family of transformers with a pipeline plan: tiny random models of each, and what is trained beside them."""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 6
LENGTH = 7
VOCABULARY = 64
# Fields of a configuration -> small values; those that a family does not have are left out.
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 5,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "zero_expert_num": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": LAYERS - 1,
    # latent attention
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "qk_head_dim": 8,
    "o_lora_rank": 8,
    "o_groups": 2,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "block_size": 4,
    # inputs per layer
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "laurel_rank": 4,
    "num_global_key_value_heads": 2,
    "global_head_dim": 8,
}


def small_config(config_class: Any) -> Any:
    """A tiny configuration: sizes small, layers of different kinds as in the defaults, no dropout."""
    default = config_class()
    fields = default.to_dict()
    changes: dict[str, Any] = {}
    layers = getattr(default, "num_hidden_layers", None)
    for name, value in fields.items():
        if name in SMALL and (value is not None or name in ("pad_token_id", "bos_token_id", "eos_token_id")):
            changes[name] = SMALL[name]
        elif name == "output_router_logits":  # the routers' own loss counts
            changes[name] = True
        elif "drop" in name and isinstance(value, float):
            changes[name] = 0.0
        elif isinstance(value, list) and len(value) == layers:
            changes[name] = _some(value)
    if "kv_lora_rank" in fields:  # latent attention has as many key heads, and rotates a part of each
        changes["num_key_value_heads"] = SMALL["num_attention_heads"]
        if "head_dim" in changes:
            changes["head_dim"] = SMALL["qk_rope_head_dim"]
    rope = fields.get("rope_parameters") or {}
    if "mrope_section" in rope:
        changes["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    changes.update(EXTRA.get(default.model_type, {}))
    return config_class(**changes)


def _some(values: list[Any]) -> list[Any]:
    """One value per layer, with as many kinds in their order as there is room for."""
    starts = [i for i, each in enumerate(values) if i == 0 or each != values[i - 1]]
    first = starts[1] if len(starts) > 1 else 0
    begin = max(0, min(first - LAYERS // 2, len(values) - LAYERS))
    return values[begin : begin + LAYERS]


_HEADS = {"num_key_value_heads": SMALL["num_attention_heads"]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}}
_HALVES = {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}
# What the rules of `small_config` leave open.
EXTRA: dict[str, dict[str, Any]] = {
    "esmc": _HEADS,
    "glm5_next_text": {**_HEADS, "index_kpool": 2, "qk_rope_head_dim": 0, "head_dim": 4},
    "dots3_note_text": _HEADS,
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "step3p5": {"sliding_window": 5},
    "dots1": {"sliding_window": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "ministral": {"head_dim": 8},
    "glm4v_text": _SECTIONS,
    "glm4v_moe_text": _HALVES,
    "glm_image_text": _SECTIONS,
    "glm_ocr_text": _SECTIONS,
    "paddleocr_vl_text": _SECTIONS,
    "qwen2_5_omni_text": _SECTIONS,
    "qwen2_5_vl_text": _SECTIONS,
    "qwen2_vl_text": _SECTIONS,
    "qwen3_omni_moe_talker_code_predictor": {"layer_types": ["full_attention"] * LAYERS},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)], "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [2, 1, 1]} for kind in ("full_attention", "sliding_attention")
        }
    },
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "longcat_flash": {"num_layers": LAYERS // 2},  # of two attentions each
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16},
    "muse_spark_text": {"moe_hidden_size": 16},
    "phi4_multimodal": {  # text alone is trained
        "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "audio_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 16),
        },
    },
    "t5_gemma_module": {"dropout_rate": 0.0},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "t5gemma2_decoder": {"dropout_rate": 0.0},
}
# Models that neither mapping of transformers names.
_CLASSES = {
    "t5_gemma_module": "T5GemmaEncoder",
    "t5gemma2_text": "T5Gemma2TextEncoder",
    "t5gemma2_decoder": "T5Gemma2Decoder",
    "voxtral_realtime_text": "VoxtralRealtimeTextModel",
    "deepseek_ocr2_encoder": "DeepseekOcr2VisionEncoder",
    "diffusion_gemma_text": "DiffusionGemmaEncoderTextModel",
    "deepseek_ocr2_text": "DeepseekOcr2TextModel",
    "ernie4_5_vl_moe_text": "Ernie4_5_VLMoeTextModel",
    "paddleocr_vl_text": "PaddleOCRTextModel",
    "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel",
    "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeTalkerCodePredictorModel",
}


PARTS = 8  # of all families, each a test: to know their names takes loading them all


@cache
def families() -> dict[str, Any]:
    """Model type -> configuration class, of all configurations with a pipeline plan. Loads all configurations."""
    from transformers import CONFIG_MAPPING

    return {kind: found for kind in CONFIG_MAPPING if (found := family(kind)) is not None}


def family(kind: str) -> Any:
    """The configuration class of a model type with a pipeline plan, or None."""
    from transformers import CONFIG_MAPPING

    try:
        found = CONFIG_MAPPING[kind]  # whose `get` loads nothing
    except KeyError:
        return None
    return found if found.base_model_pp_plan else None


def compared(part: int) -> list[str]:
    """Every `PARTS`-th of the families that are compared."""
    return [kind for kind in sorted(families()) if kind not in reason_without()][part::PARTS]


def model_class(config_class: Any) -> Any:
    """The causal language model of a configuration; without one, its base model."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

    if config_class.model_type in _CLASSES:
        home = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
        return getattr(home, _CLASSES[config_class.model_type])
    for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING):
        if config_class in mapping:
            found = mapping[config_class]
            return found[0] if isinstance(found, tuple) else found
    home = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    own = (each for each in vars(home).values() if getattr(each, "config_class", None) is config_class)
    return next(each for each in own if each.__name__.endswith("Model") and "PreTrained" not in each.__name__)


def small_model(kind: str) -> nn.Module:
    """A tiny model of a family in float64, with random values that no initialization left at zero."""
    config_class = family(kind)
    config = small_config(config_class)
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(config_class)._from_config(config, experts_implementation="eager")
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.1
            shift = 1.0 if "norm" in name and parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
    return model.double().train()


def batch(samples: int) -> dict[str, Tensor]:
    """Token ids and a mask, with padding in the last sample."""
    ids = torch.randint(3, VOCABULARY, (samples, LENGTH), generator=torch.Generator().manual_seed(samples))
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """A loss of a model's main output, the mean over samples, with the loss of its routers."""
    logits = output.get("logits") if "logits" in output else output["last_hidden_state"]
    value = (logits.double() * torch.linspace(0.5, 1.5, logits.shape[-1], dtype=torch.float64)).sin().mean()
    aux = output.get("aux_loss")
    value = value if aux is None else value + aux.double() / 10
    return value + logits.double().square().mean() + 0 * targets.sum()


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
NUM_MICROBATCHES = 6  # interleaved needs a multiple of the ranks


def reference(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model's own accumulation over the micro-batches."""
    samples, total = len(inputs["input_ids"]), 0.0
    pieces = [
        dict(zip(inputs, each, strict=True))
        for each in zip(*(t.tensor_split(NUM_MICROBATCHES) for t in inputs.values()), strict=True)
    ]
    for piece in pieces:
        loss = loss_of(model(**piece, use_cache=False), piece["input_ids"]) * (len(piece["input_ids"]) / samples)
        loss.backward()
        total += loss.item()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, found


def difference(
    model: nn.Module, inputs: dict[str, Tensor], expected: tuple[float, dict[str, Tensor]], ranks: int, schedule: str
) -> float:
    """The largest difference of loss and gradients between a pipeline and the model, relative to the largest value."""
    import pipeloom as pl

    built = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=NUM_MICROBATCHES)
    loss, gradients = expected
    with pl.Pipeline(model, built, loss_fn=loss_of) as pipe:
        worst = abs(pipe.step(inputs, inputs["input_ids"]).item() - loss) / abs(loss)
        found = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    model.zero_grad()
    largest = max(g.abs().max().item() for g in gradients.values())
    for name in gradients.keys() | found.keys():
        own, wanted = found.get(name), gradients.get(name)
        if own is None or wanted is None:
            other = own if wanted is None else wanted
            worst = max(worst, other.abs().max().item() / largest)
        else:
            worst = max(worst, (own - wanted).abs().max().item() / max(wanted.abs().max().item(), 1e-3 * largest))
    return worst


def reason_without() -> dict[str, str]:
    """Families that are not compared, and why."""
    return {
        "hrm_text": "its forward runs the same layers several times",
        "deepseek_ocr2_encoder": "an encoder of image patches, which takes no token ids",
        "voxtral_realtime_text": "its layers read the times of an audio encoder",
        "qwen3_omni_moe_talker_code_predictor": "it takes hidden states of another model, and no token ids",
        "qwen3_omni_moe_talker_text": "it takes hidden states of another model, and no token ids",
        "t5gemma2_decoder": "its layers read the output of an encoder",
    }
