"""`LossScaler`: the factor that keeps gradients of float16 away from zero."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipeloom.errors import InputError


class LossScaler:
    """A dynamic factor of the loss (mixed precision training, arXiv:1710.03740, section 3.2), as torch.amp.GradScaler.

    Small gradients vanish in float16, large ones overflow. So the loss is multiplied before the backward, by as much
    as does not overflow, and gradients are divided by the same before the update. An update whose gradients are not
    finite is left out, and the factor backs off; after some without, it grows. All ranks decide by the norm over all
    gradients, so that they agree.

    Args:
        scale: the first factor; a power of two, so that scaling rounds nothing.
        growth_steps: after so many updates without overflow the factor doubles.

    Attributes:
        scale: of the next step.
        num_skipped: updates left out so far.

    Raises:
        InputError: not a finite positive factor, or no number of steps.
    """

    def __init__(self, scale: float = 65536.0, *, growth_steps: int = 2000) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"loss scale {scale}: it is a finite factor above 0; give a power of two")
        if growth_steps < 1:
            raise InputError(f"growth_steps is {growth_steps}: the scale grows after a number of steps; give 1 or more")
        self.scale = scale
        self.growth_steps = growth_steps
        self.num_skipped = 0
        self._num_finite = 0  # since the factor last changed

    def update(self, *, finite: bool) -> None:
        """Take in whether the gradients of a step were finite; every rank calls it with the same answer."""
        if not finite:
            self.num_skipped += 1
            self.scale, self._num_finite = self.scale / 2, 0
            return
        self._num_finite += 1
        if self._num_finite == self.growth_steps:
            self.scale, self._num_finite = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """What a checkpoint has to remember."""
        return {"scale": self.scale, "num_finite": self._num_finite, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """The inverse of `state`."""
        self.scale = float(state["scale"])
        self._num_finite, self.num_skipped = int(state["num_finite"]), int(state["num_skipped"])
