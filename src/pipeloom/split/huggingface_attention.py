"""Attention of transformers' models for parts of sequences: slices, and the tokens of a context-parallel rank.

The functions are registered with transformers, see `DecoderStage.prepare_slicing`. For whole sequences they are the
model's own. Shapes: queries [batch, heads, tokens, width], keys and values with the same or fewer heads, result [batch,
tokens, heads, width].
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.slicing import Tokens, causal_attention
from pipeloom.slicing.attention import context_attention
from pipeloom.slicing.tokens import current_part

REPLACED = {"sdpa": "pipeloom_sdpa", "eager": "pipeloom_eager"}  # attention of a model -> its replacement for parts


def register() -> None:
    """Make the replacements known to transformers."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(REPLACED["sdpa"], partial(_sdpa, sdpa_attention_forward))
    AttentionInterface.register(REPLACED["eager"], _eager)


def _sdpa(
    whole: Callable[..., tuple[Tensor, Tensor | None]],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    """Calls `whole`, transformers' own ``sdpa``, for whole sequences."""
    part = current_part()
    if isinstance(part, Tokens):
        window = settings.get("sliding_window")
        attended = context_attention(
            part, query, key, value, causal=True, dropout_p=dropout, scale=scaling, window=window
        )
        return attended.transpose(1, 2).contiguous(), None
    if part is None:
        return whole(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings)
    attended = causal_attention(query, key, value, module, dropout_p=dropout, scale=scaling, mask=attention_mask)
    return attended.transpose(1, 2).contiguous(), None


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `eager_attention_forward` of the model's module, with the keys and values of earlier slices."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    part = current_part()
    if isinstance(part, Tokens):
        raise InputError(
            f"{type(module).__name__} with attn_implementation='eager': context parallelism does not support it. Load "
            "the model with attn_implementation='sdpa'."
        )
    if part is not None:
        if settings.get("dropout"):
            raise InputError(
                f"{type(module).__name__} with attn_implementation='eager' and attention dropout: dropout masks would "
                "depend on the slices. Use attn_implementation='sdpa'."
            )
        key, value = part.extend((module, "keys"), key), part.extend((module, "values"), value)
    return own(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]
