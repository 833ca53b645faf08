"""Dropout with masks that do not depend on the boundaries of slices.

The random numbers of a call are drawn in blocks of tokens, each with a generator seeded with (context, call, block). A
slice thus draws the numbers of its tokens regardless of where it starts, and the same ones in recomputation, without
saved state.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.slicing.context import Slice, current_slice

_BLOCK = 32  # tokens


def dropout(x: Tensor, p: float, owner: Hashable) -> Tensor:
    """Dropout in training. Outside of slices, this is ``F.dropout``.

    Args:
        x: [batch, tokens, ...] with the tokens of the current slice.
        p: dropout probability.
        owner: the module that calls, or (module, name); see `Slice.extend`.

    Raises:
        InputError: dimension 1 of `x` has another size than the slice.
    """
    piece = current_slice()
    if piece is None or p == 0:
        return F.dropout(x, p) if p else x
    if x.dim() < 2 or x.shape[1] != piece.end - piece.start:
        raise InputError(
            f"dropout of a tensor {list(x.shape)} in a slice of {piece.end - piece.start} tokens: dimension 1 must be "
            "the tokens of the slice. Reshape the tensor."
        )
    dropped = drop_mask(piece, p, owner, [x.shape[0], *x.shape[2:]], x.device)
    return scaled(x.masked_fill(dropped.transpose(0, 1), 0.0), p)


def drop_mask(
    piece: Slice, p: float, owner: Hashable, shape: list[int], device: torch.device, *, over_keys: bool = False
) -> Tensor:
    """A mask that is True for dropped elements, [tokens of the slice, *shape]; with `over_keys`, [..., piece.end].

    With `over_keys`, numbers are drawn only up to the end of each token's block; the causal mask hides later keys.
    """
    generator = torch.Generator(device)
    key = piece.call_key((owner, "dropout"))
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
        if current_slice() is None or not self.training:
            return super().forward(input)
        return dropout(input, self.p, self)
