"""`LayerTimes`: seconds of a model's own layers, measured on this machine. No torch here.

They replace the times of kernels where the same micro-batch was measured. Elsewhere the times of kernels are scaled by
what they are off at the nearest measured micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Three = tuple[float, float, float]  # seconds of F, I and W, whose backwards run as a whole


class LayerSeconds(NamedTuple):
    """One micro-batch on one process with whole layers.

    Attributes:
        embedding, head: seconds; the head with the last norm and the loss.
        blocks: of blocks without experts (False) and with them (True).
        split: seconds of a split backward of a block over those of a whole one.
    """

    embedding: Three
    head: Three
    blocks: Mapping[bool, Three]
    split: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Layers of one model in one number format.

    Attributes:
        element: bytes of a number in forwards.
        rows: by samples per micro-batch.
        update: seconds of an update over those of the machine's table.
        step_seconds: of a step beside its computations, messages and update.
    """

    element: int
    rows: Mapping[int, LayerSeconds] = field(default_factory=dict)
    update: float = 1.0
    step_seconds: float = 0.0

    def nearest(self, samples: int) -> tuple[int, LayerSeconds]:
        """The measured micro-batch whose size is nearest, by ratio."""
        found = min(self.rows, key=lambda each: (max(each, samples) / min(each, samples), each))
        return found, self.rows[found]

    def split(self, samples: int) -> float:
        """Seconds of a split backward over those of a whole one, for micro-batches of `samples`."""
        return max(1.0, self.nearest(samples)[1].split) if self.rows else 1.0
