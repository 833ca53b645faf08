"""`mean_over_labels`: a loss that is the mean over all labels of a step, however they are spread."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipeloom.autograd.loss_metrics import Mean, Sum, counts_of_labels, zero_of
from pipeloom.errors import InputError, folded, one_line

_IGNORED = -100
_PARTS = 2**52  # of one, in which a number that is no integer is added up
_FACTOR = "label factor"  # marks the targets of a micro-batch that knows its part of all labels


class LabelMean:
    """The loss of `mean_over_labels`. A pipeline calls `prepare`, `count` and `weigh` before a batch runs."""

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], ignore_index: int, shift: bool, counts: Callable[[Any], Any] | None
    ) -> None:
        if not callable(loss_fn):
            raise InputError(f"loss_fn={folded(loss_fn)}: must be a function, called as loss_fn(output, targets).")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise InputError(f"ignore_index={folded(ignore_index)}: must be an integer, the label that does not count.")
        if counts is not None and not callable(counts):
            raise InputError(
                f"counts={folded(counts)}: must be a function of the targets that returns which elements count. Pass "
                "counts=lambda targets: targets['mask']."
            )
        if counts is not None and (shift or ignore_index != _IGNORED):
            raise InputError("counts with shift or ignore_index: counts alone says what counts. Remove the others.")
        self._loss_fn, self._ignored, self._shift, self._counts_fn = loss_fn, ignore_index, shift, counts
        self._is_empty, self._was_told = False, False

    def of(self, watch: Callable[[Callable[[Any, Any], Any]], Callable[[Any, Any], Any]]) -> "LabelMean":
        """The same mean, of another function that `watch` makes from its `loss_fn`."""
        found = copy.copy(self)
        found._loss_fn = watch(self._loss_fn)
        return found

    def prepare(self, targets: Any) -> Any:
        """The targets of a full batch, with labels shifted by one position where that is asked for."""
        if self._shift:
            labels = _labels_of(targets)
            shifted = F.pad(labels[:, 1:], (0, 1), value=self._ignored)
            targets = {**targets, "labels": shifted} if isinstance(targets, Mapping) else shifted
        return {"targets": targets}

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """What counts in this replica: the whole part, and 2^52 times the rest, which replicas add up exactly.

        Args:
            whole: targets of its micro-batches, with whole sequences.
        """
        total = math.fsum(self._numbers(whole))
        return math.floor(total), int((total - math.floor(total)) * _PARTS)

    def weigh(self, batch: Any, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Add to the targets of a `pipeloom.engine.batch.Batch` their parts of the `counts` of all replicas."""
        total = counts[0] + counts[1] / _PARTS
        self._is_empty, numbers = not total, self._numbers(whole)
        batch.targets = [
            {
                "targets": target["targets"],
                "size": (size := self._counted(given["targets"]).numel()),
                "count": own,
                _FACTOR: size / ((total or 1.0) * weight),
            }
            for target, given, own, weight in zip(batch.targets, whole, numbers, batch.weights, strict=True)
        ]

    def told(self) -> str | None:
        """A text about a batch in which nothing counts, once."""
        if not self._is_empty or self._was_told:
            return None
        self._was_told = True
        if self._counts_fn is not None:
            return "counts is 0 everywhere in the batch: the loss is 0 and trains nothing. Check the mask."
        seen = f"no label of the batch counts, all are {self._ignored}"
        return f"{seen}: the loss is 0 and trains nothing. Check the labels."

    def _numbers(self, targets: Sequence[Any]) -> list[float]:
        """How many elements count in each micro-batch, or the sum of their weights.

        Raises:
            InputError: weights below 0, or that are no numbers.
        """
        counted = [self._counted(each["targets"]) for each in targets]
        if not counted:
            return []
        if self._counts_fn is None:
            return list(map(float, counts_of_labels(counted, self._ignored)))
        sums = torch.stack([torch.stack([each.double().sum(), each.double().abs().sum()]) for each in counted])
        found: list[list[float]] = sums.tolist()
        wrong = next((each for each, size in found if not each == size < math.inf), None)
        if wrong is not None:
            raise InputError(f"counts returned weights with the sum {wrong:g}: must be finite and not below 0.")
        return [each for each, _ in found]

    def number(self, targets: Any) -> float:
        """How much counts in some samples, a slice or a part of a sequence."""
        counted = self._counted(targets)
        return float(counted.double().sum() if self._counts_fn is not None else (counted != self._ignored).sum())

    def _counted(self, targets: Any) -> Tensor:
        """The labels, or what `counts` returns."""
        if self._counts_fn is None:
            return _labels_of(targets)
        try:
            found = self._counts_fn(targets)
        except Exception as error:
            raise InputError(f"counts raised {one_line(error)} for the targets {_seen(targets)}.") from error
        if not isinstance(found, Tensor) or found.is_complex() or not found.dim():
            raise InputError(
                f"counts returned {folded(found)} for the targets {_seen(targets)}: must be a mask, or weights, of "
                "shape [samples, ...]."
            )
        return found

    def __call__(self, output: Any, targets: Any) -> Any:
        """The loss of a micro-batch or a slice as its part of the whole; of any other targets, that of `loss_fn`."""
        if not (isinstance(targets, Mapping) and _FACTOR in targets):
            return self._loss_fn(output, targets if not self._shift else self.prepare(targets)["targets"])
        size = self._counted(targets["targets"]).numel()
        is_whole = size == targets["size"]  # of a slice or a part of a sequence, the labels are not known yet
        count = targets["count"] if is_whole else self.number(targets["targets"])
        result = self._loss_fn(output, targets["targets"])
        given = dict(result) if isinstance(result, Mapping) else {"loss": result}
        metrics = {
            name: value if isinstance(value, Mean | Sum) else Mean(value, count)
            for name, value in given.items()
            if name != "loss"
        }
        if "loss" not in given:
            return result
        factor = count * targets[_FACTOR] / max(1, size)
        loss = given["loss"] * factor if count else zero_of(output)  # the mean over no label is not a number
        return {"loss": loss, **metrics} if metrics else loss


def mean_over_labels(
    loss_fn: Callable[[Any, Any], Any],
    *,
    ignore_index: int = _IGNORED,
    shift: bool = False,
    counts: Callable[[Any], Any] | None = None,
) -> Callable[[Any, Any], Any]:
    """A loss for `pipeloom.Pipeline` that is the mean over the labels that count, of all micro-batches and replicas.

    Micro-batches, slices and replicas often have different numbers of labels, for example with padding. The mean of
    their means is not the mean over the labels of the batch; the loss of this function is. A micro-batch without labels
    that count adds nothing::

        loss_fn = pl.mean_over_labels(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    The same for the mean over the elements of a mask, or a weighted mean::

        loss_fn = pl.mean_over_labels(
            lambda output, t: F.mse_loss(output[t["mask"]], t["values"][t["mask"]]), counts=lambda t: t["mask"]
        )

    Args:
        loss_fn: ``loss_fn(output, targets)``: the mean over those labels of a micro-batch that are not `ignore_index`,
            such as `torch.nn.functional.cross_entropy`; or a dict of this "loss" and metrics, which are then means over
            the labels too. The labels are `targets`, or ``targets["labels"]`` of a dict.
        ignore_index: the label of positions that do not count.
        shift: whether labels are token ids that are not shifted yet: position t is scored by label t + 1. The labels
            that `loss_fn` gets are shifted.
        counts: for means over other elements than integer labels: a function of the targets of a micro-batch that
            returns which elements count, as a mask or as weights from 0 on of any type and shape [samples, ...].
            `loss_fn` is then the mean over the elements of the mask, or the weighted sum divided by the sum of the
            weights, times any constant. Targets of slices are slices of the targets.

    Raises:
        InputError: `loss_fn` or `counts` is no function, or `ignore_index` no integer; in a step, targets without
            labels, or `counts` that raises or returns something else.
    """
    return LabelMean(loss_fn, ignore_index, shift, counts)


def _labels_of(targets: Any) -> Tensor:
    labels = targets.get("labels") if isinstance(targets, Mapping) else targets
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim():
        return labels
    raise InputError(
        f"mean_over_labels: the targets are {_seen(targets)}: must be a tensor of integer labels, or a dict with one "
        "under 'labels'. For other targets, pass counts=lambda targets: ..., which returns a mask."
    )


def _seen(targets: Any) -> str:
    return f"a dict with {', '.join(map(repr, targets))}" if isinstance(targets, Mapping) else folded(targets)
