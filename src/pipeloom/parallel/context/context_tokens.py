# ruff: noqa: N803  # shapes are part of the names
"""`ContextTokens`: the tokens of one micro-batch on a context-parallel rank, and the attention of each kind."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.context.all_to_all import all_to_all_attention
from pipeloom.parallel.context.masks import Mask
from pipeloom.parallel.context.order import Order, OrderName
from pipeloom.parallel.context.ring import Ring, ring_attention
from pipeloom.parallel.context.ring_self_attention import ring_self_attention
from pipeloom.slicing.tokens import Tokens

ContextKind = Literal["ring", "ring-plain", "ring-self-attention", "ulysses"]

ORDERS: dict[ContextKind, OrderName] = {
    "ring": "zig-zag",
    "ring-plain": "plain",
    "ring-self-attention": "plain",
    "ulysses": "plain",
}


class KeptRows:
    """This rank's rows of tables such as rotary angles: for the last sequence length, as long as the table lives.

    All blocks and micro-batches save the same rows for their backwards.
    """

    def __init__(self) -> None:
        self._kept: MutableMapping[Tensor, tuple[tuple[int, int], Tensor]] = WeakTensorKeyDictionary()

    def of(self, table: Tensor, length: int, find: Callable[[Tensor], Tensor]) -> Tensor:
        """What `find` returns for a table; once for each of its versions."""
        state = (table._version, length)
        kept = self._kept.get(table)
        if kept is None or kept[0] != state:
            kept = self._kept[table] = (state, find(table))
        return kept[1]


class ContextTokens(Tokens):
    """This rank's tokens of sequences of equal length.

    Args:
        axis: the ranks that share the sequences.
        kind: how attention communicates.
        length: tokens of a whole sequence.
        padding: [B, length], 0 for keys that no query attends to; None: there are none.
        documents: integers [B, length]; a query attends to keys with its own number alone. None: one document.
        kept_rows: rows of tables, shared between micro-batches.

    Raises:
        InputError: a length that cannot be divided, or masks of another shape.
    """

    def __init__(
        self,
        axis: Axis,
        kind: ContextKind,
        length: int,
        *,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        kept_rows: KeptRows | None = None,
    ) -> None:
        self._order = Order.of(ORDERS[kind], axis.degree, length, why=f"cp={axis.degree} with context {kind!r}")
        super().__init__(length, self._order.num_held)
        for name, mask in (("padding", padding), ("documents", documents)):
            if mask is not None and (mask.dim() != 2 or mask.shape[1] != length):
                raise InputError(
                    f"{name} of shape {list(mask.shape)}: must be [samples, {length}], as the sequences are."
                )
        self._axis, self._kind, self._documents = axis, kind, documents
        self._kept = None if padding is None else padding.bool()
        self._kept_rows = KeptRows() if kept_rows is None else kept_rows
        self._positions: dict[tuple[int, torch.device | None], Tensor] = {}
        self._masks: dict[tuple[bool, int | None], Mask] = {}

    def positions(self, device: torch.device | None = None) -> Tensor:
        return self._positions_of(self._axis.index, device)

    def rows(self, table: Tensor) -> Tensor:
        # Rows made in inference mode cannot be saved for a later backward.
        if table.requires_grad or table.is_inference() or torch.is_inference_mode_enabled():
            return super().rows(table)
        return self._kept_rows.of(table, self.length, super().rows)

    def _positions_of(self, rank: int, device: torch.device | None) -> Tensor:
        key = rank, device
        if key not in self._positions:
            ranges = [torch.arange(start, end, device=device) for start, end in self._order.ranges(rank)]
            self._positions[key] = torch.cat(ranges)
        return self._positions[key]

    def attend(
        self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, scale: float | None, window: int | None
    ) -> Tensor:
        if not q_BHSD.shape[2] == k_BKSD.shape[2] == self.num_held:
            raise InputError(
                f"attention with {q_BHSD.shape[2]} queries and {k_BKSD.shape[2]} keys on a context-parallel rank that "
                f"holds {self.num_held} of {self.length} tokens: the numbers must be equal. Keep the sequence length "
                "constant through the model."
            )
        if q_BHSD.shape[1] % k_BKSD.shape[1]:
            raise InputError(
                f"attention with {q_BHSD.shape[1]} query heads and {k_BKSD.shape[1]} key heads: the first must be a "
                "multiple of the second."
            )
        scale = q_BHSD.shape[-1] ** -0.5 if scale is None else scale
        window = None if window is None or window >= self.length else window
        mask = self._masks.setdefault((causal, window), Mask(causal, window, self._kept, self._documents))
        if self._kind == "ring-self-attention":
            allowed = self._rows(mask, q_BHSD.device) if causal or not mask.is_simple else None
            return ring_self_attention(q_BHSD, k_BKSD, v_BKSD, self._axis, allowed, scale)
        if self._kind == "ulysses" and self._axis.degree > 1:
            whole = self._ring(None, Order("plain", 1, self.length), mask, scale, q_BHSD.device)
            return all_to_all_attention(
                q_BHSD, k_BKSD, v_BKSD, self._axis, lambda q, k, v: ring_attention(q, k, v, whole)
            )
        ring = self._ring(self._axis, self._order, mask, scale, q_BHSD.device)
        return ring_attention(q_BHSD, k_BKSD, v_BKSD, ring)

    def _ring(self, axis: Axis | None, order: Order, mask: Mask, scale: float, device: torch.device) -> Ring:
        if axis is None:
            return Ring(None, order, mask, lambda _: torch.arange(self.length, device=device), scale)
        return Ring(axis, order, mask, lambda rank: self._positions_of(rank, device), scale)

    def _rows(self, mask: Mask, device: torch.device) -> Tensor:
        """The mask of this rank's queries and all keys, [B or 1, 1, S, length]."""
        return mask.block(self.positions(device), torch.arange(self.length, device=device))
