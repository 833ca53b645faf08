"""One process's optimizer inside a stream: every stage updates by itself, when its own gradient is there.

Of an optimizer over several stages only the parameters of one have a gradient at that moment; torch's optimizers leave
the others alone. Learning rates are set for the update and put back behind the run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

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
        if not self.max_norm > 0:
            raise InputError(f"max_norm is {self.max_norm}: a norm to clip to is above 0; leave it out for no clipping")
        if self.discount not in ("none", "inverse", "pipemare"):
            raise InputError(f"discount is {self.discount!r}: it is one of 'none', 'inverse', 'pipemare'")
        if (self.discount == "pipemare") is not (self.discount_updates is not None) or self.discount_updates == 0:
            raise InputError(
                f"discount {self.discount!r} with discount_updates {self.discount_updates}: 'pipemare' needs the "
                "number of updates after which nothing is discounted any more, no other has one; correct one of them"
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
        self._base: list[float] = []

    def begin(self) -> None:
        """Note parameters as they are, and learning rates where they are going to be set."""
        self.trained = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        if self._options.sets_rates:
            self._base = [float(group["lr"]) for group in self._optimizer.param_groups]

    def end(self) -> None:
        """Put the learning rates back."""
        if self._options.sets_rates:
            self._set_rates(self._base, 1.0)

    def apply(self, weights: WeightVersions, gradients: Gradients, update: StageUpdate) -> float:
        """Clip, update, and make the stage's next version.

        Returns:
            The 2-norm of the stage's gradient before clipping.

        Raises:
            RunError: it is not finite.
        """
        found = [gradient for gradient in gradients if gradient is not None]
        norm = _norm(found)
        if not math.isfinite(float(norm)):
            raise RunError(
                f"update {update.update} of stage {update.stage}, for batch {update.batch}, has gradient norm "
                f"{float(norm)}: training cannot go on from there; lower the learning rate, or go on from an earlier "
                "state"
            )

        def step() -> None:
            if math.isfinite(self._bound):
                torch.nn.utils.clip_grads_with_norm_(weights.parameters, self._bound, norm)
            with ExitStack() as stack:
                for device in {gradient.device.type for gradient in found}:  # a run may be inside autocast
                    if torch.is_autocast_enabled(device):
                        stack.enter_context(torch.autocast(device, enabled=False))
                self._optimizer.step()

        with self._lock:
            if self._options.sets_rates:
                self._set_rates(self._rates(update), self._options.factor(update))
            weights.update(update.update, gradients, step)
        return float(norm)

    def _rates(self, update: StageUpdate) -> Sequence[float]:
        """One for each parameter group, before discounts."""
        if self._options.learning_rate is None:
            return self._base
        given = self._options.learning_rate(update.batch)
        rates = given if isinstance(given, Sequence) else [given] * len(self._base)
        if len(rates) != len(self._base):
            raise InputError(
                f"learning_rate gave {len(rates)} rates for {len(self._base)} parameter groups: it gives one for all, "
                "or one for each"
            )
        return rates

    def _set_rates(self, rates: Sequence[float], factor: float) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], Tensor):  # as optimizers that are captured in graphs keep it
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor


def _norm(gradients: list[Tensor]) -> Tensor:
    """What torch.nn.utils.get_total_norm gives, in a fifth of its time where all are of one kind."""
    if len({(gradient.device, gradient.dtype) for gradient in gradients}) != 1:
        return torch.nn.utils.get_total_norm(gradients)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    return norm
