# ruff: noqa: N803  # shapes are part of the names
"""Ring attention: keys and values travel around the ring, and each rank merges what its queries find in every block.

    hop 0   rank r computes with its own keys and values          sends them to rank r+1 meanwhile
    hop t   with those of rank r-t                                sends them on meanwhile
    backward: the same again, and the gradients of keys and values travel behind them, home in the last hop

arXiv:2310.01889, section 3. Per block, the output and its log-sum-exp come from a flash attention kernel; blocks that
causal order or documents mask are not computed. The graph keeps q, k, v, the output and its log-sum-exp.

Bytes per rank and call, with n ranks: forward (n-1) (k + v), backward (n-1) (k + v + dk + dv), with the gradients in at
least 32 bits.

Shapes: B batch, H query heads, K key heads, S tokens of this rank, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.context import kernels
from pipeloom.parallel.context.masks import Mask
from pipeloom.parallel.context.order import Block, Order


class MaskedBlock(NamedTuple):
    """A block to compute, and its mask, boolean [B or 1, 1, rows, columns]; None: as `block` says."""

    block: Block
    mask: Tensor | None


@dataclass(slots=True)
class Ring:
    """What a call of ring attention knows of the ranks.

    Args:
        axis: the ranks; None: this rank holds whole sequences.
        order: which tokens each rank holds.
        mask: which keys a query attends to.
        positions: by rank, [S] on the device of the queries; read where the mask is not simple.
        scale: factor of the scores.
    """

    axis: Axis | None
    order: Order
    mask: Mask
    positions: Callable[[int], Tensor]
    scale: float

    @property
    def degree(self) -> int:
        return 1 if self.axis is None else self.axis.degree

    def source(self, hop: int) -> int:
        """The rank whose keys are here in a hop."""
        return 0 if self.axis is None else (self.axis.index - hop) % self.axis.degree

    def blocks(self, hop: int) -> Iterator[MaskedBlock]:
        """The blocks that are computed in a hop."""
        source, own = self.source(hop), self.source(0)
        for number, block in enumerate(self.order.blocks(own, source, causal=self.mask.causal)):
            if self.mask.is_simple:
                yield MaskedBlock(block, None)
                continue
            rows, columns = self.positions(own)[block.rows], self.positions(source)[block.columns]
            needed = self.mask.needed((source, number), rows, columns, triangle=block.causal)
            if isinstance(needed, Tensor):
                yield MaskedBlock(block._replace(causal=False), needed)
            elif needed:
                yield MaskedBlock(block, None)

    def shift(self, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
        """`Axis.shift`, between ranks that run the same batch."""
        assert self.axis is not None
        return shift_equal(self.axis, tensors)


def shift_equal(axis: Axis, tensors: list[Tensor]) -> Callable[[], list[Tensor]]:
    """`Axis.shift` of tensors that have the same shape on all ranks.

    Raises:
        InputError: from the function that waits: another shape has arrived.
    """
    wait = axis.shift(tensors)

    def checked() -> list[Tensor]:
        found = wait()
        for own, other in zip(tensors, found, strict=True):
            if own.shape != other.shape:
                raise InputError(
                    f"attention with keys of shape {list(own.shape)} on rank {axis.index} along cp, and of shape "
                    f"{list(other.shape)} on another: all ranks that share sequences run the same batch. Pass the same "
                    "full batch on each."
                )
        return found

    return checked


def ring_attention(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: Ring) -> Tensor:
    """Attention of this rank's queries to the keys and values of all ranks, [B, H, S, D]; all ranks call it.

    A query without any key gets 0.
    """
    found: Tensor = _Ring.apply(q_BHSD, k_BKSD, v_BKSD, ring)  # type: ignore[no-untyped-call]
    return found


class _Sum:
    """The merged output and log-sum-exp of the blocks so far, in at least 32 bits."""

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._dtype = torch.promote_types(q.dtype, torch.float32)
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge what rows of the queries find in one more block."""
        if self.out is None or self.lse is None:
            if out.shape[2] == self._q.shape[2]:
                self.out, self.lse = out.to(self._dtype), lse.to(self._dtype)
                return
            self._begin()
            assert self.out is not None
            assert self.lse is not None
        before, sums = self.out[:, :, rows], self.lse[:, :, rows]
        before.lerp_(out.to(self._dtype), (lse - sums).sigmoid_().unsqueeze(-1))
        torch.logaddexp(sums, lse.to(self._dtype), out=sums)

    def _begin(self) -> None:
        self.out = self._q.new_zeros(self._q.shape, dtype=self._dtype)
        self.lse = self._q.new_full(self._q.shape[:-1], kernels.lowest(self._dtype), dtype=self._dtype)

    def finish(self, *, may_be_empty: bool) -> tuple[Tensor, Tensor]:
        """The output in the dtype of the queries, and the log-sum-exp, infinite where there was no key."""
        if self.out is None or self.lse is None:
            self._begin()
        assert self.out is not None
        assert self.lse is not None
        if may_be_empty:
            empty = self.lse < kernels.lowest(self._q.dtype) / 2
            self.out.masked_fill_(empty.unsqueeze(-1), 0.0)
            self.lse.masked_fill_(empty, torch.inf)
        return self.out.to(self._q.dtype), self.lse


class _Ring(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        merged, held, last = _Sum(q), [k, v], ring.degree - 1
        for hop in range(ring.degree):
            arriving = ring.shift(held) if hop < last else None
            for (rows, columns, causal), mask in ring.blocks(hop):
                k_held, v_held = (tensor[:, :, columns] for tensor in held)
                found = kernels.forward(q[:, :, rows], k_held, v_held, causal=causal, mask=mask, scale=ring.scale)
                merged.add(rows, *found)
            if arriving is not None:
                held = arriving()
        out, lse = merged.finish(may_be_empty=not ring.mask.is_simple)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        dtype, last = torch.promote_types(k.dtype, torch.float32), ring.degree - 1
        dq = torch.zeros_like(q, dtype=dtype)
        held, own, travelling = [k, v], [k, v], None
        for hop in range(ring.degree):
            arriving = ring.shift(held) if hop < last else None
            sums = [torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) for tensor in held]
            for (rows, columns, causal), mask in ring.blocks(hop):
                seen = [tensor[:, :, rows] for tensor in (d_out, q, out, lse)]
                k_held, v_held = (tensor[:, :, columns] for tensor in held)
                found = kernels.backward(
                    *(seen[0], seen[1], k_held, v_held, seen[2], seen[3]), causal=causal, mask=mask, scale=ring.scale
                )
                dq[:, :, rows] += found[0]
                sums[0][:, :, columns] += found[1]
                sums[1][:, :, columns] += found[2]
            if hop == 0:  # the gradients of the own keys wait here for those that other ranks find
                own = sums
            else:
                if travelling is not None:
                    for gradient, earlier in zip(sums, travelling(), strict=True):
                        gradient += earlier
                travelling = ring.shift(sums)
            if arriving is not None:
                held = arriving()
        if travelling is not None:
            for gradient, found_elsewhere in zip(own, travelling(), strict=True):
                gradient += found_elsewhere
        return dq.to(q.dtype), own[0].to(k.dtype), own[1].to(v.dtype), None
