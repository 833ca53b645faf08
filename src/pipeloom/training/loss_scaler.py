"""`LossScaler`: the factor of the loss in float16."""

import math
from collections.abc import Mapping

from pipeloom.errors import InputError

LEAST_LOSS_SCALE = 2.0**-10  # gradients that overflow below it overflow at any scale


class LossScaler:
    """A dynamic loss scale (mixed precision training, arXiv:1710.03740, section 3.2), like torch.amp.GradScaler.

    Small gradients vanish in float16 and large ones overflow. The loss is therefore multiplied by the scale before the
    backward, and gradients are divided by it before the update. An update with gradients that are not finite is
    skipped, and the scale halves; after `growth_steps` finite updates it doubles. All ranks decide by the norm over all
    gradients, so they agree.

    Args:
        scale: the initial scale; a power of two, so that scaling is exact.
        growth_steps: the number of finite updates after which the scale doubles.

    Attributes:
        scale: the scale of the next step.
        num_skipped: updates skipped so far.

    Raises:
        InputError: `scale` is not finite and positive, or `growth_steps` is below 1.
    """

    def __init__(self, scale: float = 65536.0, *, growth_steps: int = 2000) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"scale={scale}: must be finite and above 0. Use a power of two.")
        if growth_steps < 1:
            raise InputError(f"growth_steps={growth_steps}: must be at least 1.")
        self.scale = scale
        self.growth_steps = growth_steps
        self.num_skipped = 0
        self._num_finite = 0  # since the factor last changed

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to whether a step's gradients were finite. Every rank calls it with the same value."""
        if not finite:
            self.num_skipped += 1
            self.scale, self._num_finite = self.scale / 2, 0
            return
        self._num_finite += 1
        if self._num_finite == self.growth_steps:
            self.scale, self._num_finite = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """The state for a checkpoint."""
        return {"scale": self.scale, "num_finite": self._num_finite, "num_skipped": self.num_skipped}

    def load(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.scale = float(state["scale"])
        self._num_finite, self.num_skipped = int(state["num_finite"]), int(state["num_skipped"])
