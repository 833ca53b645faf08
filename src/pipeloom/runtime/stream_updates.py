"""One process's optimizer inside a stream: every stage updates by itself, when its own gradient is there.

Of an optimizer over several stages only the parameters of one have a gradient at that moment; torch's optimizers leave
the others alone. Learning rates are set for the update and put back behind the run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, RunError
from pipeloom.runtime.weight_versions import Gradients, WeightVersions

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
        num_before: how many updates the stage had made before, over all runs.
        delay: how many updates came between the parameters by which the gradient was computed and those that it
            changes; of several micro-batches the largest.
    """

    stage: int
    update: int
    batch: int
    num_batches: int
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
        if not self.max_norm > 0:
            raise InputError(f"max_norm is {self.max_norm}: a norm to clip to is above 0; leave it out for no clipping")
        if self.discount not in ("none", "inverse", "pipemare"):
            raise InputError(f"discount is {self.discount!r}: it is one of 'none', 'inverse', 'pipemare'")
        if (self.discount == "pipemare") is not (self.discount_updates is not None) or self.discount_updates == 0:
            raise InputError(
                f"discount {self.discount!r} with discount_updates {self.discount_updates}: 'pipemare' needs the "
                "number of updates after which nothing is discounted any more, no other has one; correct one of them"
            )

    def factor(self, update: StageUpdate) -> float:
        """What the learning rate is multiplied by."""
        factor = float(update.num_batches) if self.scale_by_replicas else 1.0
        if self.discount == "inverse":
            return factor / (1 + update.delay)
        if self.discount_updates is not None:
            exponent = 1 - min(update.num_before / self.discount_updates, 1.0)
            return factor / math.pow(max(update.delay, 1), exponent)
        return factor


class StreamOptimizer:
    """Makes the updates of all stages of this process.

    Args:
        optimizer: of this process.
        options: of the stream.
        num_stages: of the pipeline.

    Attributes:
        trained: the parameters that the optimizer has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: UpdateOptions, num_stages: int) -> None:
        self._optimizer = optimizer
        self.trained: set[nn.Parameter] = set()
        self._options = options
        self._bound = options.max_norm / math.sqrt(num_stages)
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._base: list[Any] = []

    def begin(self) -> None:
        """Note parameters and learning rates as they are."""
        self.trained = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        self._base = [_rate_of(group) for group in self._optimizer.param_groups]

    def end(self) -> None:
        """Put the learning rates back."""
        for group, rate in zip(self._optimizer.param_groups, self._base, strict=True):
            _set_rate(group, rate)

    def apply(self, weights: WeightVersions, gradients: Gradients, update: StageUpdate) -> float:
        """Clip, update, and make the stage's next version.

        Returns:
            The 2-norm of the stage's gradient before clipping.

        Raises:
            RunError: it is not finite.
        """
        norm = _norm([gradient for gradient in gradients if gradient is not None])
        if not math.isfinite(float(norm)):
            raise RunError(
                f"update {update.update} of stage {update.stage}, for batch {update.batch}, has gradient norm "
                f"{float(norm)}: training cannot go on from there; lower the learning rate, or go on from an earlier "
                "state"
            )

        def step() -> None:
            if math.isfinite(self._bound):
                torch.nn.utils.clip_grads_with_norm_(weights.parameters, self._bound, norm)
            self._optimizer.step()

        with self._lock:
            self._set_rates(update)
            weights.update(update.update, gradients, step)
        return float(norm)

    def _set_rates(self, update: StageUpdate) -> None:
        options, groups, rates = self._options, self._optimizer.param_groups, self._base
        if options.learning_rate is not None:
            given = options.learning_rate(update.batch)
            rates = list(given) if isinstance(given, Sequence) else [given] * len(groups)
            if len(rates) != len(groups):
                raise InputError(
                    f"learning_rate gave {len(rates)} rates for {len(groups)} parameter groups: it gives one for all, "
                    "or one for each"
                )
        for group, rate in zip(groups, rates, strict=True):
            _set_rate(group, rate * options.factor(update))


def _norm(gradients: list[Tensor]) -> Tensor:
    """What torch.nn.utils.get_total_norm gives, in a fifth of its time where all are of one kind."""
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm


def _rate_of(group: dict[str, Any]) -> float:
    return float(group["lr"])


def _set_rate(group: dict[str, Any], rate: float) -> None:
    """Optimizers that are captured in graphs keep their rate as a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
