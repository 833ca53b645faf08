"""`WatchedMean`: a loss of `mean_over_labels` whose function may be no mean over the labels that count."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import local
from typing import Any

import torch
from torch import Tensor

from pipeloom.autograd.loss_metrics import loss_in
from pipeloom.engine.batch import Batch
from pipeloom.models.label_mean import LabelMean
from pipeloom.training.losses.element_means import UnequalMeans, means_of
from pipeloom.training.losses.labels import num_samples_of
from pipeloom.training.losses.output_loss import is_of_output
from pipeloom.training.losses.reductions import Reductions
from pipeloom.training.losses.sample_halves import CannotAskError, SampleHalves

_IGNORED = -100
_NUM_ASKED = 2  # batches


class WatchedMean:
    """A loss of `mean_over_labels`, for a pipeline, whose first values for halves of micro-batches are compared.

    Args:
        mean: the loss.
    """

    def __init__(self, mean: LabelMean) -> None:
        self._given = mean
        self._mean = mean.of(self._watched)
        self.prepare, self.count = self._mean.prepare, self._mean.count
        self._to_ask, self._is_part, self._to_tell = _NUM_ASKED, False, ""
        self._is_own, self._unequal = False, UnequalMeans()  # whether the loss is one that the model computed
        self._forward = local()  # of each thread, with what is seen in it

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """See `LabelMean.weigh`."""
        self._to_ask -= 1
        self._unequal.begin_batch()
        self._is_part = any(weight != 1.0 for weight in batch.weights)
        self._mean.weigh(batch, whole, counts)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the engine runs the forward of a micro-batch with its loss."""
        self._forward.seen = seen = Reductions() if self._is_own and self._to_ask >= 0 else None
        with seen or nullcontext():
            yield

    def _watched(self, loss_fn: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        halves = SampleHalves(loss_fn, _IGNORED, self._given.number)

        def watched(output: Any, targets: Any) -> Any:
            result = loss_fn(output, targets)
            if self._to_ask >= 0 and self._is_part:
                loss = loss_in(result)
                if isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
                    self._ask(halves, output, targets, loss)
            return result

        return watched

    def _ask(self, halves: SampleHalves, output: Any, targets: Any, loss: Tensor) -> None:
        if is_of_output(loss, output):
            self._compare_own(targets, loss)
            return
        try:
            self._to_tell = halves.ask(output, targets, loss, knows_means=False) or ""
        except CannotAskError:
            self._to_ask = -1
        if self._to_tell:
            self._to_ask = -1

    @torch.no_grad()
    def _compare_own(self, targets: Any, loss: Tensor) -> None:
        """Compare the numbers of elements of a loss that the model computed with the labels that count."""
        self._is_own, seen = True, getattr(self._forward, "seen", None)
        self._forward.seen = None
        num_samples = num_samples_of(targets)
        if seen is None or not num_samples:
            return
        text = self._unequal.compare(means_of(loss, seen, num_samples), num_samples, [self._given.number(targets)])
        if text is not None:
            self._to_ask = -1
            self._to_tell = (
                f"mean_over_labels gets a loss that the model computed, {text}: these are not the labels that count. "
                "Leave out loss_fn, or pass shift=True or counts, so that the same elements count."
            )

    def __call__(self, output: Any, targets: Any) -> Any:
        """See `LabelMean`."""
        return self._mean(output, targets)

    def told(self) -> str | None:
        """A text about a loss that is another than that of the whole batch, once."""
        text, self._to_tell = self._to_tell, ""
        return text or self._mean.told()
