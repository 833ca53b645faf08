"""`Architecture` of a Hugging Face configuration (config.json). Needs neither torch nor transformers.

A configuration has the names of its family, and leaves out what is its family's default. Read are the names of about
all decoders of transformers. Not in a configuration, and taken from the activation and the family: whether an MLP is
gated, whether layers have biases, and which positions a model has. Dropout does not count: fused attention keeps no
weights. Layers of another kind than attention and MLPs are refused, and so is a configuration without a size that has
no usual default.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pipeloom.errors import InputError, folded
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.plan.architecture import Architecture

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "kv_n_heads")
_MLP = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "dff")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_EVERY = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_LEARNED = (  # families with learned positions
    *("gpt2", "gpt-sw3", "gpt_bigcode", "opt", "openai-gpt", "biogpt", "gpt_neo"),
    *("bert", "roberta", "camembert"),
)
_PLAIN = (  # families whose MLPs are not gated, whatever the activation, and of 4 widths by default
    *(*_LEARNED, "bloom", "falcon", "mpt", "gptj", "codegen", "gpt_neox", "gpt_neox_japanese", "phi", "starcoder2"),
    *("xglm", "ctrl", "persimmon", "nemotron", "arcee"),
)
_BIASED = (*_LEARNED, "bloom", "gpt_neox", "gptj", "phi", "codegen", "starcoder2", "xglm", "ctrl")
_TIED = (
    *(*_LEARNED, "bloom", "falcon", "mpt", "xglm", "ctrl"),
    *("gemma", "gemma2", "gemma3_text", "vaultgemma", "cohere", "cohere2"),
)
_GATED = (  # families with gates, whatever the activation
    *("gemma", "gemma2", "gemma3_text", "gemma3", "vaultgemma", "bitnet"),
    *("modernbert", "modernbert-decoder"),
)
_WITH_EXPERTS = ("mixtral", "dbrx", "gpt_oss", "dots1", "minimax_m2")  # and those that are called so
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act_fn", "afn")
_GATES = ("silu", "swiglu", "swish")
_KNOWN_ACTIVATIONS = (
    *_GATES,
    *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh", "quick_gelu"),
    *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "relu", "relu2", "relu6"),
    *("sigmoid", "tanh", "xielu"),
)
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", "window_attention")
_OTHER_LAYERS = {  # by keys that configurations with such layers have
    **dict.fromkeys(("mamba_d_state", "mamba_d_ssm", "mamba_n_heads", "mamba_num_heads"), "state-space"),
    **dict.fromkeys(("state_size", "ssm_state_size", "time_step_rank", "lru_width"), "state-space"),
    **dict.fromkeys(("conv_L_cache", "conv_kernel"), "convolution"),
    "kv_lora_rank": "multi-head latent attention",
    "hidden_size_per_layer_input": "embeddings of every block",
    "embedding_size": "embeddings of another width",
    "input_embedding_size": "embeddings of another width",
    "is_encoder_decoder": "encoder and decoder",
}
_OTHER_FAMILIES = {  # whose configurations do not show it
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), "multi-head latent attention (kv_lora_rank)"),
    **dict.fromkeys(("jetmoe", "doge"), "mixtures of attention or of single neurons"),
    **dict.fromkeys(("xlnet", "reformer"), "their own kinds of attention"),
    **dict.fromkeys(("mamba", "mamba2", "jamba", "bamba", "zamba", "zamba2", "falcon_h1"), "state-space"),
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm", "falcon_mamba", "nemotron_h"), "state-space"),
    **dict.fromkeys(("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"), "embeddings of every block"),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "convolution"),
    "hrm_text": "blocks that compute several times",
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), "embeddings of every block"),
    **dict.fromkeys(("got_ocr2", "git", "phi4_multimodal", "moss_transcribe_diarize"), "images or sound"),
    **dict.fromkeys(("moshi", "flint", "roc_bert", "big_bird", "xmod"), "other blocks or embeddings"),
}


def is_configuration(content: Mapping[str, Any]) -> bool:
    """Whether these are the keys of a Hugging Face configuration."""
    return "model_type" in content or "architectures" in content or any(name in content for name in _LAYERS)


class _Sizes:
    """The entries of a configuration.

    Args:
        content: of config.json.
        option: that names it, for error messages.
    """

    def __init__(self, content: Mapping[str, Any], option: str) -> None:
        self._option, found = option, dict(content)
        for inner in ("text_config", "ffn_config", "attn_config"):
            if isinstance(content.get(inner), Mapping):
                found |= content[inner] | ({"model_type": content.get("model_type")} if inner != "text_config" else {})
        self._found = found
        family = found.get("model_type")
        if family is not None and not isinstance(family, str):
            raise InputError(f"{option}: model_type is {folded(family)}: must be the name of a family.")
        self.family = family or ""

    def get(self, name: str) -> Any:
        return self._found.get(name)

    def has(self, *names: str) -> bool:
        return any(self._found.get(name) is not None for name in names)

    def number(self, names: tuple[str, ...], default: int | None = None, *, zero: bool = False) -> int:
        """The first of these entries.

        Args:
            names: of different families.
            default: where there is none; None: there has to be one.
            zero: whether 0 means the default, for example no experts.
        """
        for name in names:
            found = self._found.get(name)
            if found is None or (zero and type(found) is int and found == 0):
                continue
            if type(found) is not int or found < 1:
                raise InputError(f"{self._option}: {name} is {folded(found)}: must be an integer of at least 1.")
            return found
        if default is None:
            raise InputError(
                f"{self._option}: has no {names[0]}. Pass the config.json of a decoder, or give --model.* sizes."
            )
        return default


def architecture_of(content: Mapping[str, Any], option: str) -> Architecture:
    """The sizes of a decoder.

    Args:
        content: of config.json.
        option: that names it, for error messages.

    Raises:
        InputError: it lacks a size that has no usual default; or layers are of a kind that is not predicted.
    """
    try:
        return _architecture(_Sizes(content, option))
    except InputError as error:
        raise error if str(error).startswith(option) else InputError(f"{option}: {error}") from None


def _architecture(sizes: _Sizes) -> Architecture:
    _check_layers(sizes)
    family, width, heads = sizes.family, sizes.number(_WIDTH), sizes.number(_HEADS)
    one_key_head = sizes.get("multi_query") is True and not sizes.get("new_decoder_architecture")
    gated = (_activation(sizes) in _GATES and family not in _PLAIN) or family in _GATED
    mlp_width = _mlp_width(sizes, width, gated=gated)
    experts = _experts(sizes, mlp_width, gated=gated)
    if experts is not None and family.startswith("llama4"):  # its names are those of experts
        mlp_width = sizes.number(("intermediate_size_mlp",))
    positions: Literal["learned", "rotary"] = "learned" if family in _LEARNED else "rotary"
    return Architecture(
        name=family or "model",
        layers=sizes.number(_LAYERS),
        width=width,
        heads=heads,
        key_heads=1 if one_key_head else sizes.number(_KEY_HEADS, heads),
        given_head_width=sizes.number(("head_dim",), width // heads) if sizes.has("head_dim") else None,
        mlp_width=mlp_width,
        gated=gated,
        vocabulary_size=sizes.number(("vocab_size", "padded_vocab_size")),
        sequence_length=sizes.number(_POSITIONS, 2048),
        norm="rms" if sizes.has("rms_norm_eps", "layernorm_epsilon") else "layer",
        positions=positions,
        biases=family in _BIASED,
        tie_embeddings=_tied(sizes),
        experts=experts,
        experts_every=1 if experts is None else sizes.number(_EVERY, 1),
        dense_blocks=0 if experts is None else _dense_blocks(sizes),
    )


def _mlp_width(sizes: _Sizes, width: int, *, gated: bool) -> int:
    """Families without gates have 4 widths by default."""
    if sizes.family == "mpt":
        return width * sizes.number(("expansion_ratio",), 4)
    if sizes.has(*_EXPERT_WIDTH) and not sizes.has(*_MLP):  # no block has an MLP
        return sizes.number(_EXPERT_WIDTH)
    return sizes.number(_MLP, None if gated else 4 * width)


def _check_layers(sizes: _Sizes) -> None:
    """Raises InputError if layers are of a kind that is not predicted."""
    kind = _OTHER_FAMILIES.get(sizes.family)
    for name, other in _OTHER_LAYERS.items():
        same = name.endswith("embedding_size") and sizes.get(name) == sizes.get("hidden_size")
        if sizes.get(name) and not same:
            kind = f"{other} ({name})"
    kinds = sizes.get("layer_types")
    if isinstance(kinds, list):
        kind = next((each for each in kinds if each not in _ATTENTION), kind)
    if kind is not None:
        raise InputError(
            f"the model has layers of kind {folded(kind)}, which are not predicted. Measure the model and plan with "
            "--profile, or give --model.* sizes of a similar model."
        )


def _activation(sizes: _Sizes) -> str:
    name = next((name for name in _ACTIVATIONS if sizes.has(name)), None)
    if name is None:
        return "silu"
    found = sizes.get(name)
    found = found.get("name") if isinstance(found, Mapping) else found
    if found not in _KNOWN_ACTIVATIONS:
        raise InputError(f"{name} is {folded(found)}: must be one of {', '.join(_KNOWN_ACTIVATIONS)}.")
    return str(found)


def _tied(sizes: _Sizes) -> bool:
    found = sizes.get("tie_word_embeddings")
    if found is not None and not isinstance(found, bool):
        raise InputError(f"tie_word_embeddings is {folded(found)}: must be true or false.")
    return sizes.family in _TIED if found is None else found


def _experts(sizes: _Sizes, mlp_width: int, *, gated: bool) -> ExpertSizes | None:
    named = "moe" in sizes.family or sizes.family in _WITH_EXPERTS
    count = sizes.number(_EXPERTS, None if named and not sizes.has(*_EXPERTS) else 0, zero=True)
    if count < 2:
        return None
    width = sizes.number(_EXPERT_WIDTH, mlp_width, zero=True)
    shared = sizes.number(_SHARED, 1 if sizes.family.startswith("llama4") else 0, zero=True)
    if sizes.has("shared_expert_intermediate_size"):  # one, as wide as several
        shared = -(-sizes.number(("shared_expert_intermediate_size",), 0, zero=True) // width)
    return ExpertSizes(
        experts=count,
        top_k=sizes.number(_TOP_K, 1),
        expert_width=width,
        gated=gated,
        shared=shared,
    )


def _dense_blocks(sizes: _Sizes) -> int:
    """The first blocks that have an MLP. Raises InputError if there are others behind them."""
    name, kinds, numbers = "mlp_layer_types", sizes.get("mlp_layer_types"), sizes.get("mlp_only_layers")
    if isinstance(kinds, list):
        dense = [index for index, kind in enumerate(kinds) if kind == "dense"]
    elif isinstance(numbers, list) and numbers:
        name, dense = "mlp_only_layers", numbers
    else:
        return sizes.number(_DENSE, 0, zero=True)
    if dense != list(range(len(dense))):
        raise InputError(
            f"{name} is {folded(kinds or numbers)}: MLPs beside experts are predicted in the first blocks alone. "
            "Measure the model and plan with --profile, or give --model.* sizes of a similar model."
        )
    return len(dense)
