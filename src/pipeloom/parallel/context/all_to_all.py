# ruff: noqa: N803  # shapes are part of the names
"""Attention by all-to-all over heads (DeepSpeed-Ulysses, arXiv:2309.14509, section 3).

    before   rank r has all heads of its tokens           q, k, v in one exchange
    inside   rank r has its heads of all tokens           plain attention
    after    rank r has all heads of its tokens           the output in a second exchange

With n ranks, heads are a multiple of n. Key heads too; fewer of them are sent to all ranks whose query heads share
them.

Bytes per rank and call, forward and again backward: (n-1)/n (q + k + v + out), with key heads as they are sent.

Shapes: B batch, H query heads, K key heads, S tokens of this rank, D head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import exchange


def check_heads(heads: int, key_heads: int, degree: int) -> None:
    """Raises InputError where the heads cannot be divided between `degree` ranks."""
    divided = [name for name, count in (("query", heads), ("key", key_heads)) if count % degree]
    if not divided or (divided == ["key"] and degree % key_heads == 0):
        return
    fits = [n for n in divisors(heads) if key_heads % n == 0 or n % key_heads == 0]
    raise InputError(
        f"attention with {heads} query heads and {key_heads} key heads on cp={degree}: context 'ulysses' gives each "
        f"rank equally many of both. Use cp={either(fits)}, or context='ring'."
    )


def all_to_all_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    axis: Axis,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, [B, H, S, D]; all ranks call it.

    Args:
        axis: the ranks, which hold equal ranges of the sequence in their order.
        attend: attention of some heads of whole sequences.

    Raises:
        InputError: the heads cannot be divided between the ranks.
    """
    degree, (heads, key_heads) = axis.degree, (q_BHSD.shape[1], k_BKSD.shape[1])
    check_heads(heads, key_heads, degree)
    if key_heads % degree:
        k_BKSD, v_BKSD = (t.repeat_interleave(degree // key_heads, 1) for t in (k_BKSD, v_BKSD))
    sizes = [t.shape[1] // degree for t in (q_BHSD, k_BKSD, v_BKSD)]
    parts = zip(*(t.chunk(degree, 1) for t in (q_BHSD, k_BKSD, v_BKSD)), strict=True)
    sent = torch.cat([part for member in parts for part in member], 1)
    q, k, v = torch.split(exchange(sent, axis, 1, 2), sizes, 1)
    return exchange(attend(q, k, v), axis, 2, 1)
