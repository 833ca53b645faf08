"""`Architecture` of a Hugging Face configuration (config.json). Needs neither torch nor transformers.

A configuration has the names of its family, and leaves out what is its family's default. Read are the names of about
all decoders of transformers. Not in a configuration, and taken from the activation and the family: whether an MLP is
gated, whether layers have biases, and which positions a model has. Dropout does not count: fused attention keeps no
weights. Layers of another kind than attention and MLPs are refused.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pipeloom.errors import InputError, folded
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.plan.architecture import Architecture

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_LEARNED = ("gpt2", "gpt_bigcode", "opt", "openai-gpt", "biogpt", "xglm")  # families with learned positions
_BIASED = (*_LEARNED, "bloom", "gpt_neox", "gptj", "phi", "codegen", "starcoder2", "gpt_neo", "mpt")
_TIED = (*_LEARNED, "bloom", "falcon", "mpt", "gpt_neo", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2")
_GATED = ("gemma", "gemma2", "gemma3_text")  # with GELU
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "ffn_act_fn")
_GATES = ("silu", "swiglu", "swish")
_KNOWN_ACTIVATIONS = (
    *_GATES,
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "quick_gelu"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "relu", "relu2", "relu6"),
    *("sigmoid", "tanh", "xielu"),
)
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "window_attention")


def is_configuration(content: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a Hugging Face configuration."""
    return "model_type" in content or "architectures" in content or any(name in content for name in _LAYERS)


def architecture_of(content: Mapping[str, Any], option: str) -> Architecture:
    """The sizes of a decoder.

    Args:
        content: of config.json.
        option: that names it, for error messages.

    Raises:
        InputError: it does not say the number of blocks, the width, the heads or the vocabulary; or layers are of a
            kind that is not predicted.
    """
    inner = content.get("text_config")
    sizes = {**content, **inner} if isinstance(inner, Mapping) else dict(content)

    def number(names: tuple[str, ...], default: int | None = None) -> int:
        for name in names:
            found = sizes.get(name)
            if found is None or (type(found) is int and found == 0 and default is not None):
                continue  # 0 means none, for example no experts
            if type(found) is not int or found < 1:
                raise InputError(f"{option}: {name} is {folded(found)}: must be an integer of at least 1.")
            return found
        if default is None:
            raise InputError(
                f"{option}: has no {names[0]}. Pass the config.json of a decoder, or give --model.* sizes."
            )
        return default

    try:
        return _architecture(sizes, number)
    except InputError as error:
        raise error if str(error).startswith(option) else InputError(f"{option}: {error}") from None


def _architecture(sizes: Mapping[str, Any], number: Any) -> Architecture:
    family = str(sizes.get("model_type", ""))
    width, heads = number(_WIDTH), number(_HEADS)
    one_key_head = sizes.get("multi_query") is True and not sizes.get("new_decoder_architecture")
    _check_layers(sizes)
    gated = _activation(sizes) in _GATES or family in _GATED
    positions: Literal["learned", "rotary"] = "learned" if family in _LEARNED else "rotary"
    mlp_width = number(_MLP, 4 * width)
    return Architecture(
        name=family or "model",
        layers=number(_LAYERS),
        width=width,
        heads=heads,
        key_heads=1 if one_key_head else number(_KEY_HEADS, heads),
        given_head_width=number(("head_dim",), width // heads) if "head_dim" in sizes else None,
        mlp_width=mlp_width,
        gated=gated,
        vocabulary_size=number(("vocab_size", "padded_vocab_size")),
        sequence_length=number(_POSITIONS, 2048),
        norm="rms" if any(name in sizes for name in ("rms_norm_eps", "layernorm_epsilon")) else "layer",
        positions=positions,
        biases=family in _BIASED,
        tie_embeddings=_tied(sizes, family),
        experts=_experts(sizes, number, mlp_width, gated=gated),
        experts_every=number(_EVERY, 1),
    )


def _check_layers(sizes: Mapping[str, Any]) -> None:
    """Raises InputError if layers are of a kind that is not predicted."""
    kinds = sizes.get("layer_types")
    kind = next((each for each in kinds if each not in _ATTENTION), None) if isinstance(kinds, list) else None
    if sizes.get("kv_lora_rank"):
        kind = "multi-head latent attention (kv_lora_rank)"
    if kind is not None:
        raise InputError(
            f"the model has layers of kind {folded(kind)}, which are not predicted. Measure the model and plan with "
            "--profile, or give --model.* sizes of a similar model."
        )


def _activation(sizes: Mapping[str, Any]) -> str:
    name = next((name for name in _ACTIVATIONS if sizes.get(name) is not None), None)
    if name is not None and sizes[name] not in _KNOWN_ACTIVATIONS:
        raise InputError(f"{name} is {folded(sizes[name])}: must be one of {', '.join(_KNOWN_ACTIVATIONS)}.")
    return "silu" if name is None else str(sizes[name])


def _tied(sizes: Mapping[str, Any], family: str) -> bool:
    found = sizes.get("tie_word_embeddings")
    if found is not None and not isinstance(found, bool):
        raise InputError(f"tie_word_embeddings is {folded(found)}: must be true or false.")
    return family in _TIED if found is None else found


def _experts(sizes: Mapping[str, Any], number: Any, mlp_width: int, *, gated: bool) -> ExpertSizes | None:
    count = number(_EXPERTS, 0)
    if count < 2:
        return None
    return ExpertSizes(
        experts=count,
        top_k=number(_TOP_K, 1),
        expert_width=number(_EXPERT_WIDTH, mlp_width),
        gated=gated,
        shared=number(_SHARED, 0),
    )
