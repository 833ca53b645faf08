"""Logits of which every process has a part of the vocabulary, and their cross-entropy; the whole never exists.

On a grid of processes (`pipeloom.parallel.tensor.grids`) a process has logits of a part of the samples, too.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import gather, reduce_from
from pipeloom.parallel.tensor.cross_entropy import token_losses
from pipeloom.parallel.tensor.one_d.linear import ColumnLinear
from pipeloom.parallel.tensor.one_d.vocabulary import Vocabulary
from pipeloom.transport.values import Value, flatten, unflatten


class VocabularyLogits(Tensor):
    """Logits [.., V] of which this process has the ids of its `Vocabulary`: [.., ceil(V / t)].

    ``F.cross_entropy`` of it is the cross-entropy over the full vocabulary, see `pipeloom.parallel_cross_entropy`.
    Views, copies and other number formats keep the part. All else would see a part of the vocabulary alone, and raises:
    use ``full()``.
    """

    vocabulary: Vocabulary
    batch: Axis | None
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls, x: Tensor, vocabulary: Vocabulary, batch: Axis | None = None, rows: tuple[int, ...] | None = None
    ) -> "VocabularyLogits":
        """`x` [.., block] as the logits of a part of the vocabulary.

        Args:
            batch: the processes that share the samples of a micro-batch, along dimension 0. None: every one has all.
            rows: with `batch`, how many rows of `x` are of each micro-batch; None: there is one.
        """
        logits = x.as_subclass(cls)
        logits.vocabulary, logits.batch = vocabulary, batch
        logits.rows = (len(x),) if rows is None else rows
        return logits

    def full(self) -> Tensor:
        """All logits, on every process: a collective, which all tensor-parallel ranks call."""
        plain = gather(self.as_subclass(Tensor), self.vocabulary.axis, -1)[..., : self.vocabulary.size]
        if self.batch is None:
            return plain
        return torch.cat([gather(part, self.batch, 0) for part in torch.split(plain, list(self.rows))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            return parallel_cross_entropy(*args, **kwargs)
        source = args[0] if args else None
        if isinstance(source, list | tuple) and source:
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            if func is torch.cat and getattr(source[0], "batch", None) is not None and dim in (0, -source[0].dim()):
                return _joined(source)
            source = source[0]
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if isinstance(found, list | tuple) and any(isinstance(each, Tensor) for each in found):
            return type(found)(_part(each, source, func) for each in found)
        return _part(found, source, func) if isinstance(found, Tensor) else found


def _part(found: Tensor, source: Any, func: Any) -> Tensor:
    """The result of a function of logits, which are the logits again, or an error."""
    name = getattr(func, "__name__", str(func))
    if not isinstance(source, VocabularyLogits) or name not in _KEEPING or found.shape[-1:] != source.shape[-1:]:
        part = "a part of the ids"
        if isinstance(source, VocabularyLogits):
            part = f"{source.vocabulary.valid} of {source.vocabulary.size} ids"
        raise InputError(
            f"{name} of logits that are shared by the vocabulary: this process has {part}. Use F.cross_entropy, "
            "logits.full(), or the kind 'column_gather' for the last layer."
        )
    rows = source.rows
    if source.batch is not None and len(found) != len(source):
        if len(found) % len(source):
            raise InputError(
                f"{name} of logits of {len(source)} rows, which share a micro-batch with those of other processes. Use "
                "logits.full()."
            )
        rows = tuple(number * (len(found) // len(source)) for number in rows)
    return VocabularyLogits.of(found, source.vocabulary, source.batch, rows)


def _joined(parts: Sequence[VocabularyLogits]) -> VocabularyLogits:
    """Logits of several micro-batches, of each of which this process has some samples."""
    first, rows = parts[0], tuple(number for part in parts for number in part.rows)
    found = torch.cat([part.as_subclass(Tensor) for part in parts])
    return VocabularyLogits.of(found, first.vocabulary, first.batch, rows)


# Functions whose results are the logits again, if their last dimension is the same.
_KEEPING = frozenset(
    (
        *("flatten", "view", "reshape", "unflatten", "contiguous", "clone", "detach", "requires_grad_", "__getitem__"),
        *("to", "float", "double", "half", "bfloat16", "type", "cpu", "cuda", "cat", "chunk", "split", "narrow"),
        *("squeeze", "unsqueeze", "mul", "div", "__mul__", "__truediv__", "__rmul__", "view_as", "__get__"),
    )
)


class VocabularyHead(ColumnLinear):
    """A last layer whose logits stay in parts: [B, S, W] -> `VocabularyLogits` [B, S, ceil(V / t)]."""

    sliceable = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        vocabulary: Vocabulary,
        *,
        transposed: bool,
        sequence: bool,
    ) -> None:
        super().__init__(weight, bias, transposed=transposed, axis=vocabulary.axis, sequence=sequence)
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        return VocabularyLogits.of(super().forward(x), self.vocabulary)


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """``F.cross_entropy`` for the logits of a last layer of kind "vocabulary", with its arguments and result.

    `F.cross_entropy` calls it for such logits. Every tensor-parallel rank gets the same loss.

    Args:
        input: `VocabularyLogits` [N, V] or [V]; other tensors go to ``F.cross_entropy``. The loss of 16-bit logits
            is in float32.
        target: token ids [N], equal on all tensor-parallel ranks. Where they share samples: of the whole micro-batch.
        ignore_index: a target without loss.
        reduction: "mean" over the targets with loss, "sum" or "none".

    Raises:
        InputError: an argument that needs the whole vocabulary: class weights, label smoothing, or probabilities as
            targets; or logits of more than two dimensions.
    """
    if not isinstance(input, VocabularyLogits):
        return F.cross_entropy(
            input, target, weight, None, ignore_index, None, reduction, label_smoothing=label_smoothing
        )
    if weight is not None or label_smoothing or size_average is not None or reduce is not None:
        raise InputError(
            "cross-entropy of logits that are shared by the vocabulary takes no weight, label_smoothing, size_average "
            "or reduce. Use the kind 'column_gather' for the last layer."
        )
    if input.dim() > 2 or target.is_floating_point() or target.dim() != input.dim() - 1:
        raise InputError(
            f"cross-entropy of logits {list(input.shape[:-1])} x vocabulary, shared by the vocabulary, and targets "
            f"{list(target.shape)} of {target.dtype}: targets must be one id per token. Flatten the tokens: "
            "F.cross_entropy(logits.flatten(0, -2), targets.flatten())."
        )
    own, batch = input.vocabulary, input.batch
    logits, ids = (input.unsqueeze(0), target.unsqueeze(0)) if input.dim() == 1 else (input, target)
    own_ids = ids if batch is None else _own_ids(ids, len(logits), batch)
    losses = token_losses(logits.as_subclass(Tensor), own_ids, own.axis, own.size, ignored=ignore_index)
    if reduction in ("mean", "sum"):
        total = losses.sum() if batch is None else reduce_from(losses.sum(), batch)
        return total / (ids != ignore_index).sum() if reduction == "mean" else total
    if reduction != "none":
        raise InputError(f"reduction={reduction!r}: must be 'mean', 'sum' or 'none'.")
    return (losses if batch is None else gather(losses, batch, 0)).view(target.shape)


def _own_ids(ids: Tensor, rows: int, batch: Axis) -> Tensor:
    """The targets of this process's samples, from those of the whole micro-batch."""
    if len(ids) != rows * batch.degree:
        raise InputError(
            f"{len(ids)} targets for logits of {rows} tokens on each of {batch.degree} processes that share the batch: "
            f"there must be {rows * batch.degree}. Pass the targets of the whole micro-batch."
        )
    return ids.chunk(batch.degree)[batch.index]


def full_logits(value: Value) -> Value:
    """A model's output with all logits in place of a part of the vocabulary; all tensor-parallel ranks call it."""
    layout, tensors = flatten(value)
    return unflatten(layout, [t.full() if isinstance(t, VocabularyLogits) else t for t in tensors])
