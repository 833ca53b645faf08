# ruff: noqa: N803  # shapes are part of the names
"""Attention across slices of a sequence or context-parallel ranks, and dropout independent of slice boundaries.

The random numbers of a dropout are drawn in blocks of tokens, each with a generator seeded with (context, call, block).
A slice thus draws the numbers of its tokens regardless of where it starts, and the same ones in recomputation, without
saved state.

Shapes: B batch, H query heads, K key and value heads (H is a multiple of K), S tokens of the slice, T tokens from the
start of the sequence to the end of the slice, D head width.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from pipeloom.errors import InputError
from pipeloom.slicing.context import Slice, current_slice
from pipeloom.slicing.dropout_parts import draw_kept, dropout_parts, full_shape, own_part
from pipeloom.slicing.tokens import Tokens, current_tokens

_BLOCK = 32  # tokens


def causal_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    owner: Hashable,
    *,
    dropout_p: float = 0.0,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`attention` of tokens to themselves and to earlier tokens, also of earlier slices and of other ranks."""
    return attention(q_BHSD, k_BKSD, v_BKSD, owner, causal=True, dropout_p=dropout_p, scale=scale, mask=mask)


def attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    owner: Hashable,
    *,
    causal: bool,
    dropout_p: float = 0.0,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of the tokens that run now to all tokens of their sequences.

    Of whole sequences, this is ``F.scaled_dot_product_attention(..., mask, is_causal=causal)``. In a slice, keys and
    values of earlier slices are kept. Under context parallelism, those of other ranks are communicated.

    Args:
        q_BHSD, k_BKSD, v_BKSD: queries, keys and values of the current slice.
        owner: the module, under which keys and values are kept for later slices.
        dropout_p: dropout probability of attention weights; pass 0 in evaluation.
        scale: factor of the scores; defaults to ``1 / sqrt(D)``.
        causal: whether a token attends to no later token. Slices need it.
        mask: boolean [B or 1, 1, S, T], True where a query attends to a key; defaults to the causal mask.

    Returns:
        The attention output, [B, H, S, D].

    Raises:
        InputError: not `causal` in a slice; dropout or a `mask` under context parallelism.
    """
    tokens = current_tokens()
    if tokens is not None:
        if mask is not None:
            raise InputError(
                "attention got a mask under context parallelism, where a rank has a part of the tokens. Pass "
                "'attention_mask' or 'document_ids' with the inputs of the batch."
            )
        return context_attention(tokens, q_BHSD, k_BKSD, v_BKSD, causal=causal, dropout_p=dropout_p, scale=scale)
    grouped = q_BHSD.shape[1] != k_BKSD.shape[1]
    piece = current_slice()
    if piece is None:
        is_causal = causal and mask is None
        return F.scaled_dot_product_attention(
            q_BHSD, k_BKSD, v_BKSD, mask, dropout_p, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )
    if not causal:
        raise InputError(
            "attention in a slice with causal=False: later slices are not known yet. Use causal=True, or train without "
            "slices."
        )
    k_BKTD = piece.extend((owner, "keys"), k_BKSD)
    v_BKTD = piece.extend((owner, "values"), v_BKSD)
    if k_BKTD is not k_BKSD and q_BHSD.untyped_storage().nbytes() > q_BHSD.nbytes:
        q_BHSD = q_BHSD.clone()  # its memory may have keys and values too, which would stay beside their copies
    B, H, S, D = q_BHSD.shape
    dropped = None
    if dropout_p:
        parts = dropout_parts(owner).weights
        draw = drop_mask(piece, dropout_p, (owner, "weights"), full_shape([B, H], parts), q_BHSD.device, over_keys=True)
        rows = (B * k_BKSD.shape[1], H // k_BKSD.shape[1], S, -1) if grouped else (B, H, S, -1)

        def dropped() -> Tensor:
            return own_part(draw().permute(1, 2, 0, 3), parts).reshape(rows)

    if not grouped:
        return attention_core(piece, q_BHSD, k_BKTD, v_BKTD, scale, mask, dropped, dropout_p)
    # Each key head becomes a batch entry that the query heads of its group share, without a copy.
    K = k_BKSD.shape[1]
    k, v = (t.flatten(0, 1).unsqueeze(1).expand(-1, H // K, -1, -1) for t in (k_BKTD, v_BKTD))
    if mask is not None and mask.shape[0] > 1:
        mask = mask.repeat_interleave(K, 0)
    q = q_BHSD.reshape(B * K, H // K, S, D)
    return attention_core(piece, q, k, v, scale, mask, dropped, dropout_p).reshape(B, H, S, -1)


def attention_core(
    piece: Slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    mask: Tensor | None,
    dropped: Callable[[], Tensor] | None,
    dropout_p: float,
) -> Tensor:
    """Attention with dropout. A ``TorchFunctionMode`` intercepts it like a function of torch.

    Args:
        dropped: draws the mask of dropped weights, the same in every call: recomputation draws it again.
    """
    if has_torch_function((q,)):
        result: Tensor = handle_torch_function(attention_core, (q,), piece, q, k, v, scale, mask, dropped, dropout_p)
        return result
    if dropped is not None:
        allowed = _allowed(piece, q.device) if mask is None else mask
        scores = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return scaled(weights.masked_fill(dropped(), 0.0), dropout_p) @ v
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    if piece.start == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q.flip(-2), k, v, _flipped_mask(piece, q), scale=scale).flip(-2)
    from torch.nn.attention.bias import causal_lower_right  # loads torch._dynamo, which takes seconds

    lower_right = causal_lower_right(q.shape[-2], k.shape[-2])
    return F.scaled_dot_product_attention(q, k, v, lower_right, scale=scale)


def context_attention(
    tokens: Tokens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    dropout_p: float = 0.0,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`Tokens.attend`. A ``TorchFunctionMode`` intercepts it like a function of torch.

    Raises:
        InputError: dropout of attention weights, whose masks would depend on the number of ranks.
    """
    settings: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    if has_torch_function((q,)):
        result: Tensor = handle_torch_function(
            context_attention, (q,), tokens, q, k, v, dropout_p=dropout_p, **settings
        )
        return result
    if dropout_p:
        raise refused_dropout(dropout_p)
    return tokens.attend(q, k, v, causal=causal, scale=scale, window=window)


def refused_dropout(p: float) -> InputError:
    """The error for dropout of attention weights under context parallelism."""
    return InputError(
        f"dropout of attention weights with probability {p}: context parallelism does not support it. Set it to 0, and "
        "use dropout after the attention instead."
    )


def _allowed(piece: Slice, device: torch.device) -> Tensor:
    """The causal mask of a slice, [S, T]; True where a query attends to a key."""
    name = ("allowed", device)
    if name not in piece.cache:
        allowed_ST = torch.ones(piece.end - piece.start, piece.end, dtype=torch.bool, device=device)
        piece.cache[name] = allowed_ST.tril(piece.start)
    return piece.cache[name]


def _flipped_mask(piece: Slice, q: Tensor) -> Tensor:
    """The additive causal mask of a slice's queries in reverse order, [S, T], in the memory of about one row.

    Query s from the end attends to the keys before ``T - s``, so the mask depends on s + t alone, and each row is a
    view of the same buffer, shifted by one element.
    """
    name = ("flipped", q.dtype, q.device)
    if name not in piece.cache:
        piece.cache[name] = q.new_zeros(2 * piece.end - piece.start - 1).detach()
        piece.cache[name][piece.end :] = -math.inf
    return piece.cache[name].as_strided((piece.end - piece.start, piece.end), (1, 1))


def dropout(x: Tensor, p: float, owner: Hashable) -> Tensor:
    """Dropout in training. Outside of slices, this is ``F.dropout``. See `DropoutParts` for parts of a tensor.

    Args:
        x: [batch, tokens, ...] with the tokens of the current slice.
        p: dropout probability.
        owner: the module that calls, or (module, name); see `Slice.extend`.

    Raises:
        InputError: dimension 1 of `x` has another size than the slice.
    """
    if p == 0:
        return x
    piece = None if current_tokens() is not None else current_slice()
    parts = dropout_parts(owner)
    if piece is None:
        if parts.values or parts.one_generator:
            return scaled(x * draw_kept(x, p, parts), p)
        return F.dropout(x, p)
    full = full_shape(x.shape, parts.values)
    if x.dim() < 2 or full[1] != piece.end - piece.start:
        raise InputError(
            f"dropout of a tensor {full} in a slice of {piece.end - piece.start} tokens: dimension 1 must be the "
            "tokens of the slice. Reshape the tensor."
        )
    dropped = drop_mask(piece, p, owner, [full[0], *full[2:]], x.device)().transpose(0, 1)
    return scaled(x.masked_fill(own_part(dropped, parts.values), 0.0), p)


def drop_mask(
    piece: Slice, p: float, owner: Hashable, shape: list[int], device: torch.device, *, over_keys: bool = False
) -> Callable[[], Tensor]:
    """Counts a call of `owner`, and returns what draws its mask, in every call the same.

    The mask is True for dropped elements, [tokens of the slice, *shape]; with `over_keys`, [..., piece.end]. Then
    numbers are drawn only up to the end of each token's block; the causal mask hides later keys.
    """
    key = piece.call_key((owner, "dropout"))
    return partial(_draw_mask, piece, key, p, shape, device, over_keys=over_keys)


def _draw_mask(
    piece: Slice, key: Hashable, p: float, shape: list[int], device: torch.device, *, over_keys: bool
) -> Tensor:
    generator = torch.Generator(device)
    parts = []
    for block in range(piece.start // _BLOCK, (piece.end - 1) // _BLOCK + 1):
        first, end = block * _BLOCK, (block + 1) * _BLOCK
        generator.manual_seed(piece.seed(key, block))
        drawn = torch.empty([_BLOCK, *shape, *([end] if over_keys else [])], dtype=torch.bool, device=device)
        drawn.bernoulli_(p, generator=generator)
        if over_keys:
            drawn = F.pad(drawn, (0, piece.end - end), value=True)  # a negative width crops
        parts.append(drawn[max(piece.start - first, 0) : piece.end - first])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scaled(x: Tensor, p: float) -> Tensor:
    """Scale by 1 / (1 - p), which keeps the mean under dropout."""
    return x * (1 / (1 - p) if p < 1 else 0.0)


class TokenDropout(nn.Dropout):
    """`nn.Dropout` for [batch, tokens, ...] that supports slices."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self) if self.training else input
