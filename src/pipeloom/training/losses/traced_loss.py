"""`TracedLoss`: the loss that a traced model returns among its results."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from pipeloom.errors import InputError
from pipeloom.split.traced.stage import TracedStage
from pipeloom.training.losses.labels import is_label
from pipeloom.training.losses.output_loss import loss_of_output
from pipeloom.training.losses.own_loss import OwnLoss


class TracedLoss(OwnLoss):
    """The loss in the output of a traced model: under "loss" in a dict, or the only number in a tuple.

    Its graph has the labels among its inputs, which the first stage reads. The last stage reads those with names to
    weight the loss as that of `OwnLoss`; without names, losses are means over the samples of micro-batches.
    """

    joins_targets = False

    @staticmethod
    def of(model: Any, stage: nn.Module) -> "TracedLoss | None":
        """The loss of a model whose last stage this is; None: it is not traced, or its output has none."""
        if not isinstance(stage, TracedStage) or loss_of_output(stage.numbers()) is None:
            return None
        return TracedLoss(model)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._takes_number = False

    def separate(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        """Find the labels in a batch: they stay among its values.

        Raises:
            InputError: there are targets beside it.
        """
        if targets is not None:
            raise InputError(
                "targets are given, but the traced model returns its loss, from labels in its example. Pass the "
                "batch alone, with these labels in it, or pass loss_fn to Pipeline."
            )
        labels = {name: value for name, value in batch.items() if is_label(name)} if isinstance(batch, Mapping) else {}
        if len(labels) == 1:
            self._labels = next(iter(labels))
        return batch, labels or None

    def needs_labels(self, inputs: Any) -> bool:
        """Whether a batch without labels cannot be used."""
        return False
