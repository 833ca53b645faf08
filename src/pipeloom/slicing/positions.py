"""Positions of the tokens that run now: of whole sequences, of a slice, or of a context-parallel rank's tokens."""

import torch
from torch import Tensor

from pipeloom.slicing.tokens import Tokens, current_part


def sequence_length(num_tokens: int) -> int:
    """The length of the whole sequences of which `num_tokens` tokens run now."""
    part = current_part()
    return num_tokens if part is None else int(part.length)


def token_positions(num_tokens: int, device: torch.device | None = None) -> Tensor:
    """The positions of the tokens that run now in their sequence, int64 [num_tokens], ascending."""
    part = current_part()
    if isinstance(part, Tokens):
        return part.positions(device)
    start = 0 if part is None else part.start
    return torch.arange(start, start + num_tokens, device=device)


def position_rows(table: Tensor, num_tokens: int) -> Tensor:
    """The rows of a table for the positions of the tokens that run now; a view where these are a range.

    Of a table that requires no gradient, context-parallel ranks keep the rows, and use them again.

    Args:
        table: [length, ...], one row per position.
        num_tokens: tokens that run now.
    """
    part = current_part()
    if isinstance(part, Tokens):
        return part.rows(table)
    start = 0 if part is None else part.start
    return table if start == 0 and num_tokens == table.shape[0] else table[start : start + num_tokens]
