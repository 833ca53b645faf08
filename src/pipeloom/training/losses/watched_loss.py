"""`WatchedLoss`: a user's loss whose micro-batches may have no label that counts, or means over different numbers."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor

from pipeloom.autograd.loss_metrics import counts_of_labels, loss_in, zero_of
from pipeloom.engine.batch import Batch
from pipeloom.engine.elsewhere import Elsewhere, find_elsewhere
from pipeloom.engine.rank_state import LossFn
from pipeloom.errors import InputError
from pipeloom.models.label_mean import LabelMean
from pipeloom.training.losses.element_means import UnequalMeans, means_of, replicas_text
from pipeloom.training.losses.labels import labels_key, labels_of
from pipeloom.training.losses.output_loss import is_of_output, or_zero
from pipeloom.training.losses.reductions import Reductions
from pipeloom.training.losses.sample_halves import CannotAskError, SampleHalves, without_labels
from pipeloom.training.losses.term_rules import no_labels_count
from pipeloom.training.losses.watched_mean import WatchedMean
from pipeloom.transport.values import tensors_in

_MARK = "labels that count"  # marks the targets of a micro-batch in which not all do
_IGNORED = -100
_COUNTS = "counts=lambda targets: ...), with a function that returns the mask of these elements"
_TOLERANCE = 1e-3
_NUM_WATCHED = 100  # batches in which it is noticed over how many elements a loss is a mean
_NUM_ASKED = 2  # batches in which the loss may also be evaluated for halves of a micro-batch
_NUM_COUNTED = 2  # batches whose labels are counted where the host would wait for the device


class WatchedLoss:
    """A loss_fn of the user, for a pipeline.

    A loss that is not a number is 0 for a micro-batch or slice without a label that counts: the mean over no label.
    Where they have different numbers of labels that count, the first shows whether `loss_fn` is the mean over them: the
    pipeline trains a mean of means, which `tell` reports. So it is where `loss_fn` is a mean over other elements, such
    as those of a mask, of which micro-batches have different numbers per sample (`means_of`).

    On a device that works while the host goes on, labels of the first batches alone are counted: the host would wait in
    every step. Later on the device itself makes a loss without labels 0. Elsewhere too, forwards are watched in the
    first batches alone.

    Args:
        loss_fn: ``loss_fn(output, targets)``; its `ignore_index`, or -100, is the label that does not count.
        is_asynchronous: whether the loss is computed on such a device.
        in_parts: whether it gets slices or parts of sequences, which are weighted by their tokens.
        elsewhere: see `parameters_elsewhere`; the first loss must not follow from these.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        *,
        is_asynchronous: bool,
        in_parts: bool = False,
        elsewhere: Elsewhere,
    ) -> None:
        self.loss_fn, self._elsewhere = loss_fn, elsewhere
        self._left = _NUM_COUNTED if is_asynchronous else math.inf
        keywords = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
        found = keywords.get("ignore_index", getattr(loss_fn, "ignore_index", _IGNORED))
        self._ignored = found if isinstance(found, int) else _IGNORED
        self._asks = True  # whether it is not known yet whether the loss is a mean over labels
        self._to_tell = ""
        self._in_parts, self._unequal = in_parts, UnequalMeans()
        is_compiled = hasattr(loss_fn, "_torchdynamo_orig_callable") or hasattr(loss_fn, "_orig_mod")
        self._to_watch = -1 if is_compiled else _NUM_COUNTED if is_asynchronous else _NUM_WATCHED
        self._told_empty = False
        self._to_ask = _NUM_ASKED
        self._halves = SampleHalves(loss_fn, self._ignored)
        self._is_part = False  # whether a micro-batch is a part of the batch
        self._is_own: bool | None = None  # whether the loss is one that the model computed; None: not known yet
        self._forward = local()  # of each thread, with what is seen in it

    @staticmethod
    def of(
        loss_fn: LossFn | None,
        *,
        is_asynchronous: bool = False,
        in_parts: bool = False,
        elsewhere: Elsewhere | None = None,
    ) -> LossFn | None:
        """The loss to run: a loss that weighs labels itself stays."""
        if isinstance(loss_fn, LabelMean):
            return WatchedMean(loss_fn)
        if loss_fn is None or hasattr(loss_fn, "weigh"):
            return loss_fn
        return WatchedLoss(loss_fn, is_asynchronous=is_asynchronous, in_parts=in_parts, elsewhere=elsewhere or {})

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Labels of a replica, and those that count; see `pipeloom.engine.batch.LabelWeights`."""
        self._left -= 1
        self._to_watch -= 1
        self._to_ask -= 1
        self._unequal.begin_batch()
        counts = None if self._left < 0 else self._counts(whole)
        if counts is None:
            return 0, 0
        return sum(labels_of(each).numel() for each in whole), sum(counts)

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Tell the micro-batches how many labels count, where not all do, and whether that differs between them."""
        self._is_part = any(weight != 1.0 for weight in batch.weights)
        own = None if counts[0] == counts[1] else self._counts(whole)
        if own is None:
            return
        if not counts[1] and not self._told_empty:
            self._told_empty = True
            self._to_tell = no_labels_count(self._ignored)
        sizes = [labels_of(each).numel() for each in whole]
        unequal = any(count * counts[0] != counts[1] * size for count, size in zip(own, sizes, strict=True))
        batch.targets = [
            {_MARK: count, "labels": size, "asks": unequal and self._asks, "targets": each}
            for each, count, size in zip(batch.targets or (), own, sizes, strict=True)
        ]

    def _counts(self, targets: Sequence[Any]) -> list[int] | None:
        """The labels that count of each micro-batch; None: there are no labels."""
        labels = [labels_of(each) for each in targets]
        if not labels or any(each is None for each in labels):
            return None
        return counts_of_labels(labels, self._ignored)

    def __call__(self, output: Any, targets: Any) -> Any:
        result = self._loss(output, targets)
        if self._elsewhere:
            loss = loss_in(result)
            if isinstance(loss, Tensor) and loss.grad_fn is not None:
                name, self._elsewhere = find_elsewhere([loss], self._elsewhere), {}
                if name is not None:
                    raise InputError(
                        f"loss_fn reads the parameter {name!r}, which is on another rank: its gradient would be lost. "
                        "Add the term in the layers that have the parameters, with pl.auxiliary_loss, or use the "
                        "optimizer's weight_decay."
                    )
        return result

    def _loss(self, output: Any, targets: Any) -> Any:
        if not (isinstance(targets, Mapping) and _MARK in targets):
            result = self._watched(output, targets)
            return or_zero(result, labels_of(targets), self._ignored) if self._left < 0 else result
        known, given = targets, targets["targets"]
        labels, count = labels_of(given), known[_MARK]
        if labels.numel() != known["labels"]:  # a slice, or a part of the sequences
            count = int((labels != self._ignored).sum())
        result = self._watched(output, given)
        loss = loss_in(result)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return result
        if not count and loss.isnan():
            zero = zero_of(output)
            return {**result, "loss": zero} if isinstance(result, Mapping) else zero
        if count and known["asks"] and self._asks:
            self._ask(output, given, float(loss.detach()))
        return result

    def _watched(self, output: Any, targets: Any) -> Any:
        """The result, of whose loss it is noticed over how many elements it is a mean."""
        seen = Reductions() if self._to_watch >= 0 else None
        with seen or nullcontext():
            result = self.loss_fn(output, targets)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
            if self._is_own is None:
                self._is_own = is_of_output(loss, output)
            if self._is_own:
                self._compare_own(loss, targets)
                return result
            if seen is not None:
                self._compare(loss, targets, seen)
            if self._to_ask >= 0 and self._is_part:
                self._ask_halves(output, targets, loss)
        return result

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the engine runs the forward of a micro-batch with its loss."""
        self._forward.seen = seen = Reductions() if self._is_own and self._to_watch >= 0 else None
        with seen or nullcontext():
            yield

    @torch.no_grad()
    def _compare_own(self, loss: Tensor, targets: Any) -> None:
        """Compare the numbers of elements of a loss that the model computed, which labels do not show."""
        seen: Reductions | None = getattr(self._forward, "seen", None)
        sizes = [each.shape for each in tensors_in(targets) if each.dim()]
        self._forward.seen = None
        if seen is None or not sizes or not self._is_part:
            return
        means = means_of(loss, seen, sizes[0][0])
        adds = means.loop is not None and means.loop.adds is not False
        if means.is_nonlinear or adds or not any(each.divides for each in means.terms):
            self._tell_own("which is not seen to be a mean over samples")
            return
        text = self._unequal.compare(means, sizes[0][0], [sizes[0][0]])
        if text is not None:
            self._tell_own(text)

    def _ask_halves(self, output: Any, targets: Any, loss: Tensor) -> None:
        """Tell about a loss that is no mean over samples, labels or other elements."""
        try:
            text = self._halves.ask(output, targets, loss, knows_means=self._to_watch >= 0)
        except CannotAskError:
            self._to_ask = -1
            return
        if text is not None:
            self._tell(text)

    @torch.no_grad()
    def _compare(self, loss: Tensor, targets: Any, seen: Reductions) -> None:
        """Compare the numbers of elements with those of other micro-batches."""
        sizes = [each.shape for each in tensors_in(targets) if each.dim() > self._in_parts]
        if not sizes:
            return
        num_samples, tokens = sizes[0][0], sizes[0][1] if self._in_parts else 1
        means = without_labels(means_of(loss, seen, num_samples), targets, self._ignored)
        if not any(each.divides for each in means.terms):
            self._to_watch = -1
            return
        text = self._unequal.compare(means, num_samples, [num_samples * tokens])
        if text is None:
            return
        ignored = next((each.ignored for each in means.terms if each.ignored is not None), None)
        by_labels = ignored is not None and labels_of(targets) is not None
        self._tell_means(text, f"ignore_index={ignored})" if by_labels else _COUNTS)

    def elements(self) -> tuple[int, int]:
        """Over how many elements the loss of the last batch was a mean; see `LabelWeights`."""
        return self._unequal.elements() if self._to_watch >= 0 else (0, 0)

    def compare_replicas(self, own: tuple[int, int], all_replicas: tuple[int, int]) -> None:
        """Tell about a mean over other numbers of elements than in other replicas."""
        text = replicas_text(own, all_replicas, "token" if self._in_parts else "sample")
        if text is not None and self._is_own:
            self._tell_own(text)
        elif text is not None:
            self._tell_means(text, _COUNTS)

    def _tell_own(self, text: str) -> None:
        self._tell(
            f"loss_fn returns a loss that the model computed, {text}: the pipeline trains the mean of the "
            "micro-batches' losses. Leave out loss_fn, and micro-batches are weighted by their labels. For the mean "
            "over the elements of a mask, pass the mask as targets and loss_fn=pipeloom.mean_over_labels(loss_fn, "
            "counts=lambda mask: mask)."
        )

    def _tell_means(self, text: str, fix: str) -> None:
        self._tell(
            f"loss_fn is a mean over different numbers of elements, {text}: the pipeline trains the mean of their "
            f"means. For the mean over all elements, pass loss_fn=pipeloom.mean_over_labels(loss_fn, {fix}."
        )

    @torch.no_grad()
    def _ask(self, output: Any, targets: Any, loss: float) -> None:
        """Whether the loss of all labels is the mean, not the sum, of the losses of two halves of them."""
        labels = labels_of(targets)
        counted = (labels != self._ignored).flatten()
        places = counted.nonzero().flatten()
        if len(places) < 2:
            return
        parts, key = [], labels_key(targets) if isinstance(targets, Mapping) else None
        for own in (places[: len(places) // 2], places[len(places) // 2 :]):
            part = torch.full_like(labels, self._ignored).flatten()
            part[own] = labels.flatten()[own]
            masked = part.view_as(labels)
            given = masked if key is None else {**targets, key: masked}
            parts.append((len(own), float(loss_in(self.loss_fn(output, given)))))
        mean = sum(count * part for count, part in parts) / len(places)
        self._asks, bound = False, _TOLERANCE * abs(loss)
        (_, one), (_, other) = parts
        if not abs(loss - mean) <= bound < abs(loss - (one + other)) or one == other:
            return
        argument = "" if self._ignored == _IGNORED else f", ignore_index={self._ignored}"
        if key not in (None, "labels"):
            argument = f", counts=lambda targets: targets[{key!r}] != {self._ignored}"
        self._tell(
            "loss_fn is the mean over the labels of a micro-batch, and micro-batches have different numbers of labels "
            f"other than {self._ignored}: the pipeline trains the mean of their means. For the mean over all labels, "
            f"pass loss_fn=pipeloom.mean_over_labels(loss_fn{argument})."
        )

    def _tell(self, text: str) -> None:
        """Warn after this batch. One warning says enough: nothing is watched any longer."""
        self._to_tell, self._asks, self._to_watch = self._to_tell or text, False, -1
        self._to_ask = -1

    def told(self) -> str | None:
        """The text about a mean of means, once."""
        text, self._to_tell = self._to_tell, ""
        return text or None


def tell(loss_fn: LossFn | None) -> None:
    """After a batch: warn once where a loss may be another than that of the whole batch."""
    told = getattr(loss_fn, "told", None)
    text = None if told is None else told()
    if text is not None:
        warnings.warn(text, stacklevel=4)
