"""Splits decoder models of Hugging Face transformers. Stages call the model's modules as its own ``forward`` does.

    Llama family  model.embed_tokens ── model.layers.* ── model.norm ── lm_head          model.rotary_emb on every stage
    GPT-2         transformer.wte ── .wpe ── .drop ── .h.* ── .ln_f ── lm_head

The first stage takes token ids [batch, tokens], or a dict with "input_ids" and optionally "attention_mask" (0 for
padding) and "position_ids", all of that shape. The last stage returns an output with logits. Each stage computes masks
and rotary tables for its blocks; a given attention mask or position ids are sent along with the hidden states.

Slices and context parallelism (see `pipeloom.slicing`): the attention function is registered with transformers, so
blocks call it wherever they run, including recomputation.
"""

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, SplitError
from pipeloom.slicing import Slice, Tokens, token_positions
from pipeloom.slicing.tokens import current_part
from pipeloom.split.huggingface_attention import REPLACED, register
from pipeloom.split.stage_module import BlockRunner, StageModule, running


class Decoder(NamedTuple):
    """Module names of a model family.

    Attributes:
        layers: names of the layers in execution order, as for `split`.
        positions: name of the layer that adds learned position embeddings; empty: none.
        shared: names of modules without parameters that every stage runs.
    """

    layers: tuple[str, ...]
    positions: str = ""
    shared: tuple[str, ...] = ()


_LLAMA = Decoder(("model.embed_tokens", "model.layers.*", "model.norm", "lm_head"), shared=("model.rotary_emb",))
_GPT2 = Decoder(
    (*(f"transformer.{name}" for name in ("wte", "wpe", "drop", "h.*", "ln_f")), "lm_head"), positions="transformer.wpe"
)
# `config.model_type` -> the modules of models whose forward does exactly the above in every configuration.
DECODERS = {
    "gpt2": _GPT2,
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral", "qwen2", "qwen3", "olmo", "olmo2", "phi3", "smollm3", "stablelm", "glm"),
            *("glm4", "helium", "arcee", "apertus", "gemma", "nemotron", "ernie4_5"),
        ),
        _LLAMA,
    ),
}
_FIELDS = ("attention_mask", "position_ids")  # optional inputs, sent along with token ids and hidden states


def find_decoder(model: nn.Module, num_stages: int) -> Decoder | None:
    """The module names of a Hugging Face decoder; None for other models, and for unknown ones with a single stage.

    Raises:
        SplitError: several stages of an unsupported Hugging Face model.
    """
    if not any(cls.__module__.partition(".")[0] == "transformers" for cls in type(model).__mro__):
        return None
    config: Any = getattr(model, "config", None)
    decoder = DECODERS.get(getattr(config, "model_type", ""))
    if decoder is None or dict(model.named_children()).keys() != {name.partition(".")[0] for name in decoder.layers}:
        if num_stages == 1:
            return None
        raise SplitError(
            f"{type(model).__name__} with model_type={getattr(config, 'model_type', None)!r} cannot be split: no "
            "base_model_pp_plan of its configuration names its modules, and it has no list of blocks. Trace it: pass "
            "inputs as example=; or declare the order of its modules with pipeloom.register_layout, or layers=."
        )
    if getattr(config, "add_cross_attention", False):
        raise SplitError(
            f"{type(model).__name__} with add_cross_attention=True: its blocks read the output of an encoder, which "
            "stages do not receive. Use add_cross_attention=False."
        )
    return decoder


class DecoderStage(StageModule):
    """A stage of consecutive layers of a decoder. It reads the model's configuration and never changes it."""

    sliceable = True  # declared again because this class overrides forward

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], model: nn.Module, decoder: Decoder) -> None:
        layers = list(layers)
        super().__init__(layers)
        self._config: Any = model.config
        self._decoder = decoder
        self._names = [name for name, _ in layers]
        self._tokens_part: tuple[int, int] = getattr(model, "tokens_part", (0, 1))  # of hidden states: index, number
        blocks = tuple(pattern.removesuffix("*") for pattern in decoder.layers if pattern.endswith("*"))
        self._block_numbers = [int(n.rpartition(".")[2]) if n.startswith(blocks) else None for n in self._names]
        self._rotary: tuple[dict[str, nn.Module | None], str] | None = None
        if any(number is not None for number in self._block_numbers):
            for name in decoder.shared:
                self._rotary = self.place(name, copy.deepcopy(model.get_submodule(name)))

    def forward(self, value: Any, run: BlockRunner | None = None) -> Any:
        """Token ids or hidden states, as a tensor or in a dict -> hidden states in the same form, or the output.

        Args:
            value: the model's input, or the output of the previous stage.
            run: runs the blocks; by default they are called directly.
        """
        x, extras = self._unpack(value)
        part: Slice | Tokens | None = current_part()
        positions = extras.get("position_ids")
        own_part, parts = self._tokens_part
        tokens = x.shape[1] * (1 if self._names[0] == self._decoder.layers[0] else parts)
        if positions is None:
            positions = token_positions(tokens, x.device).unsqueeze(0)
        shared: dict[str, Any] | None = None
        masks: Any = None
        links = zip(self._chain, self._names, self._block_numbers, strict=True)
        for index, ((modules, key), name, number) in enumerate(links):
            module: Any = modules[key]
            running.layer = module
            if self.observer is not None:
                self.observer.before(index)
            if number is not None:
                if shared is None:
                    shared = {"position_ids": positions}
                    if self._rotary is not None:
                        rotary: Any = self._rotary[0][self._rotary[1]]
                        shared["position_embeddings"] = rotary(x, position_ids=positions)
                    like = x if parts == 1 else x.new_empty(x.shape[0], tokens, 1)
                    masks = self._masks(like, extras.get("attention_mask"), positions, part)
                mask = masks[self._attention_type(number)] if isinstance(masks, dict) else masks
                settings = {"attention_mask": mask, "past_key_values": None, "use_cache": False, **shared}
                x = module(x, **settings) if run is None else run([module], module, x, **settings)
                x = x[0] if isinstance(x, tuple) else x
            elif name == self._decoder.positions:
                x = x + module(positions.chunk(parts, 1)[own_part])
            else:
                x = module(x)
            if self.observer is not None:
                self.observer.after(index, x)
        if self._names[-1] == self._decoder.layers[-1]:
            from transformers.modeling_outputs import CausalLMOutputWithPast

            return CausalLMOutputWithPast(logits=x)
        if not extras:
            return x
        return {"hidden_states": x, **extras}

    def _unpack(self, value: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids or hidden states, and the optional inputs that are present."""
        main = "input_ids" if self._names[0] == self._decoder.layers[0] else "hidden_states"
        if isinstance(value, Tensor):
            return value, {}
        if not isinstance(value, dict) or main not in value or not {main, *_FIELDS}.issuperset(value):
            known = f"{main!r} and optionally {' and '.join(map(repr, _FIELDS))}"
            if not isinstance(value, dict):
                tensor = "token ids" if main == "input_ids" else "hidden states"
                raise InputError(
                    f"inputs have type {type(value).__name__}: must be a tensor of {tensor}, or a dict of {known}."
                )
            if "labels" in value:
                fix = "Remove 'labels', and pass the labels as targets."
            else:
                fix = f"Add {main!r}." if main not in value else "Remove the other keys."
            raise InputError(f"inputs are a dict of {', '.join(map(repr, value))}: keys must be {known}. {fix}")
        if "position_ids" in value and isinstance(current_part(), Slice):
            raise InputError(
                "inputs have 'position_ids', which slices do not support: positions are always 0, 1, 2, ... of the "
                "whole sequence. Remove 'position_ids', or train without slices."
            )
        return value[main], {name: value[name] for name in _FIELDS if value.get(name) is not None}

    def _attention_type(self, number: int) -> str:
        """The attention type of block `number`: ``full_attention``, ``sliding_attention``, ..."""
        kinds = getattr(self._config, "layer_types", None)
        if kinds is not None:
            return str(kinds[number])
        return "full_attention" if getattr(self._config, "sliding_window", None) is None else "sliding_attention"

    def _masks(self, x: Tensor, padding: Tensor | None, positions: Tensor, part: Slice | Tokens | None) -> Any:
        """The attention masks by attention type, or a single mask for all blocks."""
        if isinstance(part, Tokens):
            return None  # its attention knows the masks
        if part is None:
            from transformers.masking_utils import create_masks_for_generate

            return create_masks_for_generate(self._config, x, padding, None, positions)
        if padding is not None:
            padding = part.extend((self, "attention_mask"), padding, dim=1)
        return {kind: self._slice_mask(part, x, padding, kind) for kind in self._attention_types()}

    def _attention_types(self) -> set[str]:
        return {self._attention_type(number) for number in self._block_numbers if number is not None}

    def _slice_mask(self, piece: Slice, x: Tensor, padding: Tensor | None, kind: str) -> Tensor | None:
        """The mask of a slice's queries, [1 or batch, 1, slice, end of the slice]; None for plain causal attention.

        True where a query attends to a key; for eager attention, 0 there and the lowest finite value elsewhere.
        """
        added = self._config._attn_implementation == "eager"
        device, window = x.device, self._config.sliding_window if kind == "sliding_attention" else piece.end
        if not added and padding is None and window >= piece.end:
            return None
        queries = torch.arange(piece.start, piece.end, device=device).unsqueeze(1)
        keys = torch.arange(piece.end, device=device)
        allowed = ((keys <= queries) & (keys > queries - window))[None, None]
        if padding is not None:
            allowed = allowed & padding[:, None, None].bool()
        if not added:
            return allowed
        return torch.zeros_like(allowed, dtype=x.dtype).masked_fill_(~allowed, torch.finfo(x.dtype).min)

    def prepare_slicing(self) -> None:
        """Make attention continue across slices and ranks, and declare transformers' modules sliceable.

        Raises:
            InputError: an attention implementation, attention type or rotary embedding that supports neither slices nor
                context parallelism.
        """
        config = self._config
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        upcast = getattr(config, "reorder_and_upcast_attn", False)
        for seen, known, fix in (
            ({config._attn_implementation}, set(REPLACED), "Load the model with attn_implementation='sdpa'"),
            (self._attention_types(), {"full_attention", "sliding_attention"}, "Train on whole sequences"),
            (
                {rope} & {"dynamic", "longrope"},
                set(),
                "Train on whole sequences, or with rope_type 'default' or 'yarn'",
            ),
            ({"reorder_and_upcast_attn"} if upcast else set(), set(), "Use reorder_and_upcast_attn=False"),
        ):
            if not seen <= known:
                raise InputError(
                    f"the stage from module {self._names[0]!r} uses {', '.join(map(repr, sorted(seen - known)))}, "
                    f"which parts of a sequence do not support. {fix}."
                )
        sliced_config = copy.copy(config)
        sliced_config._attn_implementation = REPLACED[config._attn_implementation]
        register()
        homes = (f"transformers.models.{config.model_type}.", "transformers.activations", "transformers.pytorch_utils")
        for part in self.modules():
            if type(part).__module__.startswith(homes):
                part.sliceable = True  # type: ignore[assignment]
                if getattr(part, "config", None) is config:
                    part.config = sliced_config

    def prepare_context(self) -> None:
        """Validate that attention works on the tokens of a context-parallel rank.

        Raises:
            InputError: eager attention.
        """
        if self._config._attn_implementation == "eager":
            raise InputError(
                f"the stage from module {self._names[0]!r} has attn_implementation='eager', which context parallelism "
                "does not support. Load the model with attn_implementation='sdpa'."
            )
