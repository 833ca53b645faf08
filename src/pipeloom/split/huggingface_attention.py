"""Attention functions for slices, registered with transformers.

Outside of slices, they call the implementation that the model was loaded with. Shapes are those of transformers:
queries [batch, heads, tokens, width], keys and values with the same or fewer heads, result [batch, tokens, heads,
width].
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pipeloom.errors import InputError
from pipeloom.slicing import causal_attention, current_slice

# Attention implementation of a model -> its replacement for slices.
NAMES = {"sdpa": "pipeloom_sdpa", "eager": "pipeloom_eager"}


def _sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor | None]:
    if current_slice() is None:
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **settings
        )
    attended = causal_attention(query, key, value, module, dropout_p=dropout, scale=scaling, mask=attention_mask)
    return attended.transpose(1, 2).contiguous(), None


def _eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls `eager_attention_forward` of the model's module, with the keys and values of earlier slices."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    piece = current_slice()
    if piece is not None:
        if settings.get("dropout"):
            raise InputError(
                f"{type(module).__name__} with attn_implementation='eager' and attention dropout: dropout masks would "
                "depend on the slices. Use attn_implementation='sdpa'."
            )
        key, value = piece.extend((module, "keys"), key), piece.extend((module, "values"), value)
    return own(module, query, key, value, attention_mask, **settings)  # type: ignore[no-any-return]


AttentionInterface.register(NAMES["sdpa"], _sdpa)
AttentionInterface.register(NAMES["eager"], _eager)
