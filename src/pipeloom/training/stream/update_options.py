"""`UpdateOptions`: how a stream clips gradients and sets learning rates; `StageUpdate`: one update of one stage."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeloom.errors import InputError

LearningRate = Callable[[int], float | Sequence[float]]
Discount = Literal["none", "inverse", "pipemare"]


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """One update of one stage.

    Attributes:
        stage: which stage.
        update: its index in the run.
        batch: the last batch in its gradient, counted over all runs.
        num_batches: the number of batches in its gradient: 1, or more for stages with many replicas.
        num_input_batches: the same for an update of the input stage.
        num_before: the number of updates that the stage made before, in all runs.
        delay: the staleness of its gradient: the number of updates between the parameters that computed the gradient
            and those that it changes; the maximum over micro-batches.
    """

    stage: int
    update: int
    batch: int
    num_batches: int
    num_input_batches: int
    num_before: int
    delay: int


@dataclass(frozen=True, kw_only=True)
class UpdateOptions:
    """Options of `pipeloom.Stream` about gradients and learning rates; see there."""

    max_norm: float = math.inf
    learning_rate: LearningRate | None = None
    discount: Discount = "none"
    discount_updates: int | None = None
    scale_by_replicas: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, int | float) or not self.max_norm > 0:
            raise InputError(f"max_norm={self.max_norm!r}: must be a number > 0. Leave it out to disable clipping.")
        if self.discount not in ("none", "inverse", "pipemare"):
            raise InputError(f"discount={self.discount!r}: must be 'none', 'inverse' or 'pipemare'.")
        if self.learning_rate is not None and not callable(self.learning_rate):
            raise InputError(
                f"learning_rate={self.learning_rate!r}: must be callable. Pass a function of the index of a batch, or "
                "set the learning rate in the optimizer."
            )
        updates = self.discount_updates
        counts = isinstance(updates, int) and not isinstance(updates, bool) and updates >= 1
        if not counts if self.discount == "pipemare" else updates is not None:
            raise InputError(
                f"discount_updates={updates!r}: must be an integer >= 1 (updates until the discount ends) with "
                f"discount='pipemare', and None with other discounts; discount is {self.discount!r}."
            )

    @property
    def sets_rates(self) -> bool:
        """Whether the stream changes the learning rates of the optimizer's groups."""
        return self.learning_rate is not None or self.discount != "none" or self.scale_by_replicas

    def factor(self, update: StageUpdate) -> float:
        """The factor of the learning rate."""
        factor = update.num_batches / update.num_input_batches if self.scale_by_replicas else 1.0
        if self.discount == "inverse":
            return factor / max(update.delay, 1)
        if self.discount_updates is not None:
            exponent = 1 - min(update.num_before / self.discount_updates, 1.0)
            return factor / math.pow(max(update.delay, 1), exponent)
        return factor
