# ruff: noqa: N803  # shapes are part of the names
"""Ring self-attention: two passes around the ring, and a softmax over whole rows (arXiv:2105.13120, section 3.2).

    pass 1   keys travel; each rank fills its rows of the scores, [B, H, S, T]
    pass 2   values travel; each rank sums weights times values
    backward: values travel again for the gradients of the weights, keys for those of the queries; the gradients of keys
    and values are found for all ranks at once, summed, and each rank gets its own (reduce-scatter)

The graph keeps q, k, v and the weights, whose memory is S T per head: 1/n of one process's. Gradients are plain sums.

Bytes per rank and call, with n ranks: forward (n-1) (k + v), backward (n-1) (k + v + dk + dv), with the gradients in at
least 32 bits.

Shapes: B batch, H query heads, K key heads, G = H / K, S tokens of this rank, T of all ranks, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.context.kernels import lowest
from pipeloom.parallel.context.ring import shift_equal


def ring_self_attention(
    q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, axis: Axis, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, [B, H, S, D]; all ranks call it.

    Args:
        axis: the ranks, which hold equal ranges of the sequence in their order.
        mask: boolean [B or 1, 1, S, T], True where a query attends to a key; None: everywhere. A query without any key
            gets 0.
        scale: factor of the scores.
    """
    B, H, S, D = q_BHSD.shape
    K = k_BKSD.shape[1]
    q = q_BHSD.reshape(B, K, H // K, S, D)  # the heads of a group share their keys
    found: Tensor = _RingSelfAttention.apply(q, k_BKSD, v_BKSD, axis, mask, scale)  # type: ignore[no-untyped-call]
    return found.reshape(B, H, S, D)


def _travel(tensor: Tensor, axis: Axis) -> Iterator[tuple[slice, Tensor]]:
    """Every rank's tensor, as it comes by, with the columns of its tokens."""
    size = tensor.shape[-2]
    for hop in range(axis.degree):
        arriving = shift_equal(axis, [tensor]) if hop < axis.degree - 1 else None
        source = (axis.index - hop) % axis.degree
        yield slice(source * size, (source + 1) * size), tensor.unsqueeze(2)
        if arriving is not None:
            (tensor,) = arriving()


class _RingSelfAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_BKGSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, axis: Axis, mask: Tensor | None, scale: float
    ) -> Tensor:
        dtype = torch.promote_types(q_BKGSD.dtype, torch.float32)
        scores = q_BKGSD.new_empty([*q_BKGSD.shape[:-1], k_BKSD.shape[-2] * axis.degree], dtype=dtype)
        for columns, keys in _travel(k_BKSD, axis):
            scores[..., columns] = q_BKGSD @ keys.mT
        scores.mul_(scale)
        if mask is not None:
            hidden = ~mask.unsqueeze(1)
            weights = scores.masked_fill_(hidden, lowest(dtype)).softmax(-1).masked_fill_(hidden, 0.0)
        else:
            weights = scores.softmax(-1)
        del scores
        weights = weights.to(q_BKGSD.dtype)
        out = torch.zeros_like(q_BKGSD, dtype=dtype)
        for columns, values in _travel(v_BKSD, axis):
            out += weights[..., columns] @ values
        ctx.save_for_backward(q_BKGSD, k_BKSD, v_BKSD, weights)
        ctx.axis, ctx.scale = axis, scale
        return out.to(q_BKGSD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        axis: Axis = ctx.axis
        dtype = torch.promote_types(q.dtype, torch.float32)
        dv = axis.reduce_scatter((weights.mT @ d_out).sum(2, dtype=dtype), -2)
        d_weights = weights.new_empty(weights.shape, dtype=dtype)
        for columns, values in _travel(v, axis):
            d_weights[..., columns] = d_out @ values.mT
        d_scores = torch._softmax_backward_data(d_weights, weights.to(dtype), -1, dtype).mul_(ctx.scale).to(q.dtype)
        del d_weights
        dq = torch.zeros_like(q, dtype=dtype)
        for columns, keys in _travel(k, axis):
            dq += d_scores[..., columns] @ keys
        dk = axis.reduce_scatter((d_scores.mT @ q).sum(2, dtype=dtype), -2)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None
