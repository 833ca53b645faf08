"""`ContextParallel`: divides the sequences of batches between ranks, for an engine or for a loop of your own.

inputs, targets [B, S, ...]   ->   this rank's tokens [B, S/n, ...]     in `order.Order`
attention_mask, document_ids  ->   stay whole, on every stage           masks of attention
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from pipeloom.errors import InputError, listed
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.context.context_tokens import ORDERS, ContextKind, ContextTokens, KeptRows
from pipeloom.parallel.context.order import Order
from pipeloom.slicing.sequence_parts import Marks, SequenceParts
from pipeloom.transport.values import flatten, unflatten

KINDS: tuple[ContextKind, ...] = get_args(ContextKind)
_MASKS = ("attention_mask", "document_ids")


class ContextParallel(SequenceParts):
    """Context parallelism along an axis: every rank holds a part of the tokens of each sequence.

    Args:
        axis: the ranks that share the sequences, such as ``mesh.axis("cp")``.
        kind: how attention communicates. "ring": ring attention, tokens in zig-zag order, which balances causal
            attention. "ring-plain": the same with equal ranges of tokens. "ring-self-attention": two passes and a whole
            softmax. "ulysses": all-to-all over heads, which must be a multiple of the number of ranks.

    Raises:
        InputError: an unknown kind.
    """

    def __init__(self, axis: Axis, kind: ContextKind = "ring") -> None:
        if kind not in KINDS:
            raise InputError(f"context={kind!r}: must be one of {', '.join(KINDS)}.")
        self.axis, self.kind = axis, kind
        self.terms = (f"context {kind}",)
        self._kept_rows = KeptRows()

    def cut(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of whole sequences along `dim`, in order of position.

        Raises:
            InputError: a length that cannot be divided.
        """
        order = self._order(tensor.shape[dim])
        if self.axis.degree == 1:
            return tensor
        parts = [tensor.narrow(dim, start, end - start) for start, end in order.ranges(self.axis.index)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def gather(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Whole sequences along `dim`, from each rank's tokens; all ranks call it. Without autograd."""
        order = self._order(tensor.shape[dim] * self.axis.degree)
        held = torch.split(self.axis.all_gather(tensor, dim), order.chunk, dim)
        per_rank = len(order.chunks(0))
        return torch.cat([held[rank * per_rank + place] for rank, place in order.by_position()], dim)

    def _order(self, length: int) -> Order:
        degree = self.axis.degree
        return Order.of(ORDERS[self.kind], degree, length, why=f"cp={degree} with context {self.kind!r}")

    # As the engine calls it

    def cut_inputs(self, value: Any) -> tuple[Any, Marks]:
        """This rank's tokens of a micro-batch, and what all stages need to know of it.

        Tensors of two dimensions or more are cut along dimension 1. Of a dict, "attention_mask" (0 for padding) and
        "document_ids", both [B, S], are masks of attention and not passed on to the model. If "input_ids" alone is
        left, the model gets that tensor. Without both masks, documents follow from "position_ids" that start again, as
        in transformers.
        """
        marks: Marks = {}
        if isinstance(value, dict):
            masks = {name: value[name] for name in _MASKS if value.get(name) is not None}
            for name, mask in masks.items():
                if not isinstance(mask, Tensor) or mask.dim() != 2:
                    seen = f"shape {list(mask.shape)}" if isinstance(mask, Tensor) else f"type {type(mask).__name__}"
                    raise InputError(
                        f"inputs have {name!r} of {seen}: context parallelism needs a tensor [samples, tokens]. Pass "
                        "one, or use cp=1."
                    )
            positions = value.get("position_ids")
            if not masks and isinstance(positions, Tensor) and positions.dim() == 2:
                starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
                if bool(starts.any()):
                    masks["document_ids"] = starts.cumsum(1)
            marks |= masks
            value = {name: item for name, item in value.items() if name not in _MASKS}
            if value.keys() == {"input_ids"}:
                value = value["input_ids"]
        layout, tensors = flatten(value)
        marks["length"] = self._length("inputs", [*tensors, *(mask for mask in marks.values())])
        return unflatten(layout, [self.cut(t) if t.dim() > 1 else t for t in tensors]), marks

    def cut_targets(self, value: Any) -> Any:
        layout, tensors = flatten(value)
        self._length("targets", tensors)
        return unflatten(layout, [self.cut(t) if t.dim() > 1 else t for t in tensors])

    def _length(self, what: str, tensors: Iterable[Tensor]) -> int:
        lengths = {tensor.shape[1] for tensor in tensors if tensor.dim() > 1}
        if not lengths:
            raise InputError(
                f"{what} hold no tensor of two dimensions or more: context parallelism cuts dimension 1, the tokens. "
                "Pass tensors of shape (samples, tokens, ...), or use cp=1."
            )
        if len(lengths) > 1:
            raise InputError(
                f"{what} hold tensors of {listed(sorted(lengths))} along dimension 1: context parallelism cuts this "
                "dimension, the tokens, so it must be equal in all tensors. Pad the sequences, or use cp=1."
            )
        (length,) = lengths
        self._order(length)
        return length

    def tokens(self, marks: Marks) -> ContextTokens:
        """The tokens of a micro-batch with these marks: ``with context.tokens({"length": S}).current(): model(x)``.

        Args:
            marks: "length" of whole sequences; optionally "attention_mask" and "document_ids", [B, length].
        """
        padding, documents = (marks.get(name) for name in _MASKS)
        return ContextTokens(
            *(self.axis, self.kind, marks["length"]), padding=padding, documents=documents, kept_rows=self._kept_rows
        )

    def join(self, value: Any) -> Any:
        """Whole sequences of an output: tensors of two dimensions or more are gathered along dimension 1."""
        layout, tensors = flatten(value)
        return unflatten(layout, [self.gather(t) if t.dim() > 1 else t for t in tensors])
