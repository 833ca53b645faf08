"""Losses that depend on the labels of the whole batch, spread over micro-batches and replicas."""

from collections.abc import Sequence
from typing import Any, Protocol

from pipeloom.engine.batch import Batch
from pipeloom.transport.values import Value


class LabelWeights(Protocol):
    """What a loss_fn, or the targets of a batch, may have so that labels are weighted."""

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Labels of this replica, and those that count.

        Args:
            whole: targets of its micro-batches, with whole sequences.
        """

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Replace the targets of a batch with its weights, for labels of all replicas with these `counts`."""


def prepared(loss_fn: Any, targets: Value) -> Value:
    """The targets of a full batch as `loss_fn` wants them, before the batch is cut."""
    prepare = getattr(loss_fn, "prepare", None)
    return targets if prepare is None or targets is None else prepare(targets)


def label_weights(loss_fn: Any, targets: Value) -> LabelWeights | None:
    """What weighs the labels of a batch with these prepared targets; None: nothing does."""
    return next((each for each in (targets, loss_fn) if hasattr(each, "weigh")), None)
