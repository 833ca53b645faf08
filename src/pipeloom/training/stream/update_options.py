"""What a stream is told of its updates, and what it knows of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeloom.errors import InputError

LearningRate = Callable[[int], float | Sequence[float]]
Discount = Literal["none", "inverse", "pipemare"]


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """Which update it is.

    Attributes:
        stage: whose.
        update: its number in the run.
        batch: the last batch whose gradient it has, counted over all runs.
        num_batches: how many batches it holds: 1, or more where replicas need more.
        num_input_batches: how many an update of the input stage holds.
        num_before: how many updates the stage had made before, over all runs.
        delay: how many updates came between the parameters by which the gradient was computed and those that it
            changes; of several micro-batches the largest.
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
    """What a stream does with gradients and learning rates; see `pipeloom.Stream`."""

    max_norm: float = math.inf
    learning_rate: LearningRate | None = None
    discount: Discount = "none"
    discount_updates: int | None = None
    scale_by_replicas: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.max_norm, bool) or not isinstance(self.max_norm, int | float) or not self.max_norm > 0:
            raise InputError(
                f"max_norm is {self.max_norm!r}: a norm to clip to is a number above 0; leave it out for no clipping"
            )
        if self.discount not in ("none", "inverse", "pipemare"):
            raise InputError(f"discount is {self.discount!r}: it is one of 'none', 'inverse', 'pipemare'")
        if self.learning_rate is not None and not callable(self.learning_rate):
            raise InputError(
                f"learning_rate is {self.learning_rate!r}: it is called with the number of a batch; pass a function, "
                "or set the rate in the optimizer"
            )
        updates = self.discount_updates
        whole = isinstance(updates, int) and not isinstance(updates, bool) and updates >= 1
        if not whole if self.discount == "pipemare" else updates is not None:
            raise InputError(
                f"discount {self.discount!r} with discount_updates {updates!r}: 'pipemare' needs the number of updates "
                "after which nothing is discounted any more, a whole number from 1, no other has one; correct one of "
                "them"
            )

    @property
    def sets_rates(self) -> bool:
        """Whether learning rates are others than those of the optimizer's groups."""
        return self.learning_rate is not None or self.discount != "none" or self.scale_by_replicas

    def factor(self, update: StageUpdate) -> float:
        """What the learning rate is multiplied by."""
        factor = update.num_batches / update.num_input_batches if self.scale_by_replicas else 1.0
        if self.discount == "inverse":
            return factor / max(update.delay, 1)
        if self.discount_updates is not None:
            exponent = 1 - min(update.num_before / self.discount_updates, 1.0)
            return factor / math.pow(max(update.delay, 1), exponent)
        return factor
