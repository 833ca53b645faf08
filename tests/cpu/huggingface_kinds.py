"""Kinds of models of transformers without a pipeline plan: a tiny random model of each, and a batch of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipeloom as pl
from tests.cpu.huggingface_axes import float64_throughout

SAMPLES, NUM_MICROBATCHES = 6, 3
_TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_TOWER = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
_CLIP_IMAGE = {**_TOWER, "image_size": 32, "patch_size": 8, "projection_dim": 8}
_CLIP_TEXT = {**_TOWER, "vocab_size": 64, "max_position_embeddings": 16, "projection_dim": 8, "eos_token_id": 2}
_IMAGE_TOKEN = 60
_SEQ2SEQ = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
}
_T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2, "dropout_rate": 0.0}
_WHISPER = {
    **_SEQ2SEQ,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SPEECH = {
    "vocab_size": 32,
    **_TOWER,
    "conv_dim": (8, 8),
    "conv_stride": (4, 2),
    "conv_kernel": (8, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0),
    **dict.fromkeys(("layerdrop", "mask_time_prob"), 0.0),
}
_DISTIL = {"vocab_size": 64, "dim": 16, "n_layers": 4, "n_heads": 2, "hidden_dim": 24}
_DISTIL_DROPOUT = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
_DEBERTA = {"relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"], "pooler_hidden_size": 16}
_DEBERTA |= {"conv_kernel_size": 3, "conv_act": "gelu", "norm_rel_ebd": "layer_norm"}  # as the largest have
_JAMBA = {**_TOWER, "num_hidden_layers": 4, "vocab_size": 64, "num_key_value_heads": 1, "num_experts": 2}
_JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
_JAMBA |= {"use_mamba_kernels": False, "mamba_d_state": 4, "mamba_d_conv": 2, "experts_implementation": "eager"}
_FUNNEL = {"vocab_size": 64, "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "block_sizes": [2, 2]}
_FUNNEL |= dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout"), 0.0)
_MODERN = {**_TOWER, "num_hidden_layers": 4, "vocab_size": 64, "max_position_embeddings": 40, "pad_token_id": 1}
_MODERN |= dict.fromkeys(("cls_token_id", "bos_token_id", "sep_token_id", "eos_token_id"), 2)
_XLM = {"vocab_size": 64, "emb_dim": 16, "n_layers": 4, "n_heads": 2, "max_position_embeddings": 64, "layerdrop": 0.0}
_XLM |= {"dropout": 0.0, "attention_dropout": 0.0}
_PVT = {"image_size": 32, "depths": [1, 2, 1, 1], "hidden_sizes": [8] * 4, "num_attention_heads": [1, 2, 2, 2]}
_PVT |= {"sequence_reduction_ratios": [2, 2, 1, 1], "mlp_ratios": [2] * 4}
_PVT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1, 1], "num_heads": [2, 2, 2]}


class Kind(NamedTuple):
    """A kind of model.

    Attributes:
        model: name of the class in transformers.
        config: its configuration: class and values.
        batch: which inputs it takes, see `batch_of`.
    """

    model: str
    config: tuple[str, dict[str, Any]]
    batch: str


KINDS = {
    "bert": Kind("BertForMaskedLM", ("BertConfig", _TEXT), "text, tokens"),
    "roberta": Kind("RobertaForSequenceClassification", ("RobertaConfig", _TEXT), "text, classes"),
    "distilbert": Kind(
        "DistilBertForSequenceClassification", ("DistilBertConfig", {**_DISTIL, **_DISTIL_DROPOUT}), "text, classes"
    ),
    "deberta-v2": Kind(
        "DebertaV2ForSequenceClassification", ("DebertaV2Config", {**_TEXT, **_DEBERTA}), "text, classes"
    ),
    "electra": Kind("ElectraForTokenClassification", ("ElectraConfig", {**_TEXT, "embedding_size": 8}), "text, tags"),
    "opt": Kind(
        "OPTForCausalLM",
        ("OPTConfig", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16, "dropout": 0.0}),
        "text, tokens",
    ),
    "bloom": Kind(
        "BloomForCausalLM",
        ("BloomConfig", {"vocab_size": 64, "hidden_size": 16, "n_layer": 4, "n_head": 2}),
        "text, tokens",
    ),
    "t5": Kind("T5ForConditionalGeneration", ("T5Config", {**_T5, "decoder_start_token_id": 0}), "text, tokens"),
    "bart": Kind(
        "BartForConditionalGeneration", ("BartConfig", {**_SEQ2SEQ, "max_position_embeddings": 32}), "text, tokens"
    ),
    "whisper": Kind("WhisperForConditionalGeneration", ("WhisperConfig", _WHISPER), "mel, tokens"),
    "vit": Kind("ViTForImageClassification", ("ViTConfig", {**_IMAGE, "intermediate_size": 24}), "image, classes"),
    "dinov2": Kind("Dinov2ForImageClassification", ("Dinov2Config", _IMAGE), "image, classes"),
    "clip": Kind(
        "CLIPModel",
        ("CLIPConfig", {"text_config": _CLIP_TEXT, "vision_config": _CLIP_IMAGE, "projection_dim": 8}),
        "text and image",
    ),
    "clip vision": Kind("CLIPVisionModelWithProjection", ("CLIPVisionConfig", _CLIP_IMAGE), "image"),
    "swin": Kind(
        "SwinForImageClassification",
        ("SwinConfig", {**_SWIN, "window_size": 2, "drop_path_rate": 0.0}),
        "image, classes",
    ),
    "resnet": Kind(
        "ResNetForImageClassification",
        ("ResNetConfig", {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "layer_type": "basic"}),
        "image, classes",
    ),
    "convnext": Kind(
        "ConvNextForImageClassification",
        ("ConvNextConfig", {"hidden_sizes": [8] * 4, "depths": [1] * 4}),
        "image, classes",
    ),
    "wav2vec2": Kind("Wav2Vec2ForSequenceClassification", ("Wav2Vec2Config", _SPEECH), "wave, classes"),
    "wav2vec2 (stable)": Kind(
        "Wav2Vec2ForSequenceClassification",
        ("Wav2Vec2Config", {**_SPEECH, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}),
        "wave, classes",
    ),
    "hubert": Kind("HubertForSequenceClassification", ("HubertConfig", _SPEECH), "wave, classes"),
    "llava": Kind(
        "LlavaForConditionalGeneration",
        (
            "LlavaConfig",
            {
                "vision_config": {"model_type": "clip_vision_model", **_CLIP_IMAGE},
                "text_config": {"model_type": "llama", **_TOWER, "vocab_size": 64},
                "image_token_index": _IMAGE_TOKEN,
                "image_seq_length": 16,
            },
        ),
        "image, caption",
    ),
    "mamba": Kind(
        "MambaForCausalLM",
        (
            "MambaConfig",
            {"vocab_size": 64, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4, "time_step_rank": 4},
        ),
        "ids, tokens",
    ),
    "jamba": Kind("JambaForCausalLM", ("JambaConfig", _JAMBA), "text, tokens"),
    "funnel": Kind("FunnelForTokenClassification", ("FunnelConfig", _FUNNEL), "text, tags"),
    "modernbert": Kind("ModernBertForMaskedLM", ("ModernBertConfig", _MODERN), "text, tokens"),
    "xlm": Kind("XLMWithLMHeadModel", ("XLMConfig", _XLM), "text, tokens"),
    "flaubert": Kind("FlaubertForTokenClassification", ("FlaubertConfig", _XLM), "text, tags"),
    "poolformer": Kind(
        "PoolFormerForImageClassification",
        ("PoolFormerConfig", {"hidden_sizes": [8] * 4, "depths": [1, 1, 2, 1], "drop_path_rate": 0.0}),
        "image, classes",
    ),
    "pvt": Kind("PvtForImageClassification", ("PvtConfig", _PVT), "image, classes"),
}
RUNS = ((2, "1f1b"), (2, "zb-h1"), (3, "zb-h1"))


def batch_of(kind: str) -> dict[str, Tensor]:
    """A batch: what the model reads, and labels; labels of tokens spread unevenly over the samples."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (SAMPLES, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[-1, -2:] = 0
    caption = torch.cat([torch.full((SAMPLES, 16), _IMAGE_TOKEN), ids % _IMAGE_TOKEN], 1)
    labels = ids.clone()
    labels[0, 2:] = -100
    of_caption = caption.clone()
    of_caption[0, 18:] = -100
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    every = {
        "text": {"input_ids": ids, "attention_mask": mask},
        "ids": {"input_ids": ids},
        "caption": {"input_ids": caption, "labels": of_caption},
        "image": {"pixel_values": draw(SAMPLES, 3, 32, 32)},
        "mel": {"input_features": draw(SAMPLES, 8, 32)},
        "wave": {"input_values": draw(SAMPLES, 160)},
        "tokens": {"labels": labels},
        "tags": {"labels": labels.where(labels < 0, labels % 2)},
        "classes": {"labels": torch.arange(SAMPLES) % 2},
    }
    return {name: value for part in every for name, value in every[part].items() if part in KINDS[kind].batch}


def model_of(kind: str) -> nn.Module:
    """A tiny random model in float64."""
    import transformers

    name, values = KINDS[kind].config
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, KINDS[kind].model)(getattr(transformers, name)(**values))
    return model.double().train()


def loss_of(output: Any, targets: Any = None) -> Tensor:
    """The model's own loss; without labels, a mean over samples."""
    if output.get("loss") is not None:
        return output["loss"]
    value: Tensor = output["image_embeds"].square().mean()
    return (
        value if output.get("text_embeds") is None else value + (output["text_embeds"] * output["image_embeds"]).mean()
    )


def difference(kind: str, runs: Any = None) -> float:
    """The largest difference of loss and gradients between pipelines and the model's own accumulation."""
    batch, labelled = batch_of(kind), "labels" in batch_of(kind)
    # A loss over tokens is the mean over the labels of all micro-batches.
    parts = 1 if labelled and batch["labels"].dim() > 1 else NUM_MICROBATCHES
    with float64_throughout():
        model, total = model_of(kind), 0.0
        for index in range(parts):
            piece = {name: value.tensor_split(parts)[index] for name, value in batch.items()}
            loss = loss_of(model(**piece)) / parts
            loss.backward()
            total += loss.item()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return max(_of_run(model_of(kind), batch, labelled, total, expected, *run) for run in runs or RUNS)


def _of_run(
    model: nn.Module, batch: Any, labelled: bool, loss: float, expected: dict[str, Tensor], ranks: int, schedule: str
) -> float:
    built = pl.schedules.build(schedule, num_ranks=ranks, num_microbatches=NUM_MICROBATCHES)
    with pl.Pipeline(model, built, **({} if labelled else {"loss_fn": loss_of})) as pipe:
        found = pipe.step(*((batch,) if labelled else (batch, torch.zeros(SAMPLES)))).item()
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    largest = max(each.abs().max().item() for each in expected.values())
    worst = abs(found - loss) / abs(loss)
    for name in expected.keys() | gradients.keys():
        own, wanted = gradients.get(name), expected.get(name)
        apart = own if wanted is None else wanted if own is None else own - wanted
        scale = largest if wanted is None else max(wanted.abs().max().item(), 1e-3 * largest)
        worst = max(worst, apart.abs().max().item() / scale)
    return worst
