"""`mean_over_labels`: a loss that is the mean over all labels of a step, however they are spread."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pipeloom.autograd.loss_metrics import Mean, Sum, counts_of_labels, zero_of
from pipeloom.errors import InputError, folded

_FACTOR = "label factor"  # marks the targets of a micro-batch that knows its part of all labels


class LabelMean:
    """The loss of `mean_over_labels`. A pipeline calls `prepare`, `count` and `weigh` before a batch runs."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], ignore_index: int, shift: bool) -> None:
        if not callable(loss_fn):
            raise InputError(f"loss_fn={folded(loss_fn)}: must be a function, called as loss_fn(output, targets).")
        if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
            raise InputError(f"ignore_index={folded(ignore_index)}: must be an integer, the label that does not count.")
        self._loss_fn, self._ignored, self._shift = loss_fn, ignore_index, shift

    def prepare(self, targets: Any) -> Any:
        """The targets of a full batch, with labels shifted by one position where that is asked for."""
        labels = _labels_of(targets)
        if self._shift:
            shifted = F.pad(labels[:, 1:], (0, 1), value=self._ignored)
            targets = {**targets, "labels": shifted} if isinstance(targets, Mapping) else shifted
        return {"targets": targets}

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Labels of this replica, and those that count; `whole`: targets of its micro-batches, with whole sequences."""
        counts = self._counts(whole)
        return sum(_labels_of(each["targets"]).numel() for each in whole), sum(counts)

    def weigh(self, batch: Any, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Add to the targets of a `pipeloom.engine.batch.Batch` their parts of the `counts` of all replicas."""
        _, total = counts
        batch.targets = [
            {
                "targets": target["targets"],
                "size": (size := _labels_of(given["targets"]).numel()),
                "count": own,
                _FACTOR: size / (max(1, total) * weight),
            }
            for target, given, own, weight in zip(batch.targets, whole, self._counts(whole), batch.weights, strict=True)
        ]

    def _counts(self, targets: Sequence[Any]) -> list[int]:
        return counts_of_labels([_labels_of(each["targets"]) for each in targets], self._ignored)

    def __call__(self, output: Any, targets: Any) -> Any:
        """The loss of a micro-batch or a slice as its part of the whole; of any other targets, that of `loss_fn`."""
        if not (isinstance(targets, Mapping) and _FACTOR in targets):
            return self._loss_fn(output, targets if not self._shift else self.prepare(targets)["targets"])
        labels = _labels_of(targets["targets"])
        is_whole = labels.numel() == targets["size"]  # of a slice or a part of a sequence, the labels are not known yet
        count = targets["count"] if is_whole else int((labels != self._ignored).sum())
        result = self._loss_fn(output, targets["targets"])
        given = dict(result) if isinstance(result, Mapping) else {"loss": result}
        metrics = {
            name: value if isinstance(value, Mean | Sum) else Mean(value, count)
            for name, value in given.items()
            if name != "loss"
        }
        if "loss" not in given:
            return result
        factor = count * targets[_FACTOR] / max(1, labels.numel())
        loss = given["loss"] * factor if count else zero_of(output)  # the mean over no label is not a number
        return {"loss": loss, **metrics} if metrics else loss


def mean_over_labels(
    loss_fn: Callable[[Any, Any], Any], *, ignore_index: int = -100, shift: bool = False
) -> Callable[[Any, Any], Any]:
    """A loss for `pipeloom.Pipeline` that is the mean over the labels that count, of all micro-batches and replicas.

    Micro-batches, slices and replicas often have different numbers of labels, for example with padding. The mean of
    their means is not the mean over the labels of the batch; the loss of this function is. A micro-batch without labels
    that count adds nothing::

        loss_fn = pl.mean_over_labels(lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    Args:
        loss_fn: ``loss_fn(output, targets)``: the mean over those labels of a micro-batch that are not `ignore_index`,
            such as `torch.nn.functional.cross_entropy`; or a dict of this "loss" and metrics, which are then means over
            the labels too. The labels are `targets`, or ``targets["labels"]`` of a dict.
        ignore_index: the label of positions that do not count.
        shift: whether labels are token ids that are not shifted yet: position t is scored by label t + 1. The labels
            that `loss_fn` gets are shifted.

    Raises:
        InputError: `loss_fn` is no function, or `ignore_index` no integer; in a step, targets without labels.
    """
    return LabelMean(loss_fn, ignore_index, shift)


def _labels_of(targets: Any) -> Tensor:
    labels = targets.get("labels") if isinstance(targets, Mapping) else targets
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim():
        return labels
    seen = f"a dict with {', '.join(map(repr, targets))}" if isinstance(targets, Mapping) else folded(targets)
    raise InputError(
        f"mean_over_labels: the targets are {seen}: must be a tensor of integer labels, or a dict with one under "
        "'labels'."
    )
