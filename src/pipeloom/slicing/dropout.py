"""Dropout whose masks do not depend on how a sequence is sliced.

A call's random numbers are drawn in blocks of tokens, each by a generator seeded with (context, call, block). So a
slice draws its own tokens' numbers wherever it starts, and the same ones when it is recomputed, with no state kept.
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
    """Dropout of `x` [batch, tokens, ...] in training: torch's own where sequences are whole.

    Args:
        x: what to drop from; tokens are those of the current slice.
        p: probability.
        owner: whose call it is, a module or (module, name); see `Slice.extend`.

    Raises:
        InputError: `x` has other tokens than the slice.
    """
    piece = current_slice()
    if piece is None or p == 0:
        return F.dropout(x, p) if p else x
    if x.dim() < 2 or x.shape[1] != piece.end - piece.start:
        raise InputError(
            f"dropout of a tensor {list(x.shape)} in a slice of {piece.end - piece.start} tokens: tokens lie along "
            "dimension 1; reshape it"
        )
    dropped = drop_mask(piece, p, owner, [x.shape[0], *x.shape[2:]], x.device)
    return scaled(x.masked_fill(dropped.transpose(0, 1), 0.0), p)


def drop_mask(
    piece: Slice, p: float, owner: Hashable, shape: list[int], device: torch.device, *, over_keys: bool = False
) -> Tensor:
    """What to drop, [tokens of the slice, *shape]; with `over_keys`, [tokens of the slice, *shape, piece.end].

    The numbers over keys are drawn as far as the end of a token's block: later ones are masked for it anyhow.
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
            drawn = F.pad(drawn, (0, piece.end - end), value=True)  # a negative pad cuts
        parts.append(drawn[max(piece.start - first, 0) : piece.end - first])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scaled(x: Tensor, p: float) -> Tensor:
    """Make up for what was dropped."""
    return x * (1 / (1 - p) if p < 1 else 0.0)


class TokenDropout(nn.Dropout):
    """`nn.Dropout` of [batch, tokens, ...] that knows of slices; the same as it where there are none."""

    def forward(self, input: Tensor) -> Tensor:
        if current_slice() is None or not self.training:
            return super().forward(input)
        return dropout(input, self.p, self)
