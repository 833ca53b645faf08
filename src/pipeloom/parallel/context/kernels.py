"""Attention of one block of queries and keys with its log-sum-exp, and its backward, by the fastest exact kernel.

    CPU     all floating-point formats, with and without mask     torch's flash attention for CPU
    CUDA    16 bits, without mask                                 flash attention
            32 bits or narrower, without mask                     memory-efficient attention
            else                                                  matrix products and softmax

A block is a part of the keys. Results of blocks are merged by their log-sum-exp (arXiv:2310.01889, section 3; the
backward of a block with that of all keys, as in arXiv:2205.14135, section 3.1).

Grouped-query heads: each key head is a batch entry that the query heads of its group share, without a copy.

Shapes: B batch, H query heads, K key heads, G = H / K, Q queries, T keys, D head width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def lowest(dtype: torch.dtype) -> float:
    """What masked scores get in addition: finite, so that rows without a key make no NaN."""
    return torch.finfo(dtype).min / 2


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the keys of a block.

    Args:
        q: [B, H, Q, D]; k, v: [B, K, T, D].
        causal: query i attends to keys 0 to i.
        mask: boolean [B or 1, 1, Q, T], True where a query attends to a key; not with `causal`.

    Returns:
        The output [B, H, Q, D], and the log-sum-exp [B, H, Q] in at least 32 bits. Where a query attends to no key, the
        output is finite, and the log-sum-exp at most `lowest(q.dtype)` plus some scores.
    """
    if mask is not None and mask.shape[0] > 1 and q.shape[1] != k.shape[1]:  # the mask of each sequence, not copied
        each = [
            forward(*(t[b : b + 1] for t in (q, k, v)), causal=causal, mask=mask[b : b + 1], scale=scale)
            for b in range(len(q))
        ]
        outs, lses = zip(*each, strict=True)
        return torch.cat(outs), torch.cat(lses)
    shape = q.shape
    q, k, v = _grouped(q, k, v)
    out, lse = _kernel(q, mask is not None).forward(q, k, v, How(causal, _added(mask, q), scale))
    return out.reshape(shape), lse.reshape(shape[:-1])


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block adds to the gradients of q, k and v.

    Args:
        d_out: gradient of `out`.
        out, lse: of all keys; `lse` infinite where a query attends to no key.
    """
    if mask is not None and mask.shape[0] > 1 and q.shape[1] != k.shape[1]:
        each = []
        for b in range(len(q)):
            own = [t[b : b + 1] for t in (d_out, q, k, v, out, lse)]
            each.append(backward(*own, causal=causal, mask=mask[b : b + 1], scale=scale))
        dq, dk, dv = (torch.cat(parts) for parts in zip(*each, strict=True))
        return dq, dk, dv
    q_shape, k_shape = q.shape, k.shape
    groups = q_shape[1] // k_shape[1]
    q, k, v = _grouped(q, k, v)
    d_out, out, lse = d_out.reshape(q.shape), out.reshape(q.shape), lse.reshape(q.shape[:-1])
    kernel, how = _kernel(q, mask is not None), How(causal, _added(mask, q), scale)
    dq, dk, dv = kernel.backward(d_out, q, k, v, out, lse, how)
    if groups > 1:
        dk, dv = dk.sum(1), dv.sum(1)
    return dq.reshape(q_shape), dk.reshape(k_shape), dv.reshape(k_shape)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, H, Q, D = q.shape
    K = k.shape[1]
    if H == K:
        return q, k, v
    k, v = (t.flatten(0, 1).unsqueeze(1).expand(-1, H // K, -1, -1) for t in (k, v))
    return q.reshape(B * K, H // K, Q, D), k, v


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """What is added to scores."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, lowest(q.dtype))


class How(NamedTuple):
    """Settings of a kernel: see `forward`. `added` is added to scores, the mask as numbers."""

    causal: bool
    added: Tensor | None
    scale: float


Gradients = tuple[Tensor, Tensor, Tensor]


class Kernel(ABC):
    """Computes blocks; shapes are those of `forward`, with as many key heads as query heads."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        """The output and its log-sum-exp."""

    @abstractmethod
    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
        """The gradients of q, k and v."""


class Plain(Kernel):
    """Matrix products and softmax."""

    def _scores(self, q: Tensor, k: Tensor, how: How) -> Tensor:
        scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * how.scale
        if how.added is not None:
            scores = scores + how.added
        if how.causal:
            hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu_(1)
            scores = scores.masked_fill_(hidden, lowest(scores.dtype))
        return scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        scores = self._scores(q, k, how)
        lse = scores.logsumexp(-1)
        return scores.sub_(lse.unsqueeze(-1)).exp_().to(v.dtype) @ v, lse

    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
        weights = self._scores(q, k, how).sub_(lse.unsqueeze(-1)).exp_()
        rows = (d_out.to(weights.dtype) * out).sum(-1, keepdim=True)
        dv = weights.to(v.dtype).mT @ d_out
        d_scores = ((d_out @ v.mT).to(rows.dtype).sub_(rows) * weights).mul_(how.scale).to(q.dtype)
        return d_scores @ k, d_scores.mT @ q, dv


class FlashOnCPU(Kernel):
    """torch's flash attention for CPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, how.causal, attn_mask=how.added, scale=how.scale
        )
        return found

    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
        found: Gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, how.causal, attn_mask=how.added, scale=how.scale
        )
        return found


class Flash(Kernel):
    """Flash attention on CUDA, without mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, how.causal, False, scale=how.scale)
        return out, lse

    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a dropout that is not there
        sizes = (None, None, q.shape[-2], k.shape[-2])
        found: Gradients = _aten._scaled_dot_product_flash_attention_backward(
            d_out, q, k, v, out, lse.contiguous(), *sizes, 0.0, how.causal, none, none, scale=how.scale
        )
        return found


class Efficient(Kernel):
    """Memory-efficient attention on CUDA, without mask."""

    _ROWS = 32  # the kernel pads the log-sum-exp to a multiple of it

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, how.causal, scale=how.scale
        )
        return out, lse[..., : q.shape[-2]]

    def backward(self, d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, how: How) -> Gradients:
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % self._ROWS), value=torch.inf).contiguous()
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            d_out, q, k, v, None, out, lse, none, none, 0.0, wanted, how.causal, scale=how.scale
        )
        return dq, dk, dv


def _kernel(q: Tensor, masked: bool) -> Kernel:
    if q.device.type == "cpu":
        return FlashOnCPU()
    if masked or q.device.type != "cuda":
        return Plain()
    if q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return Flash()
    return Efficient() if q.dtype != torch.float64 and q.shape[-1] % 8 == 0 else Plain()
