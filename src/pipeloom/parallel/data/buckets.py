"""Which neighbouring parameters of a stage are gathered and reduced together. No torch here.

A collective has a price beside that of its bytes: processes wait for each other and threads are woken. A model of
hundreds of small layers must not pay it hundreds of times a step, and one of a few large layers must not wait with the
reduction of its gradients until all of them are there. So parameters go in buckets, as in PyTorch's DDP (Li et al.,
VLDB 2020, section 3.2.3), filled from the last layer to the first, as backwards complete them. What is left over is the
first bucket, the one that forwards wait for and that nothing hides behind backwards.

Where layers are gathered for every forward and backward (granularity microbatch), a bucket is what is there at once:
layers stay whole, and only small ones are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.ir import Granularity

# At granularity microbatch: this much more than its largest layers a stage may hold. Below it a collective takes
# longer for its start than for its bytes.
_SMALL_BYTES = 1 << 20


class Item(NamedTuple):
    """A parameter of a stage: the number of its layer, and its bytes in the format of forwards."""

    layer: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BucketRule:
    """How much goes together.

    Attributes:
        least_bytes: of every bucket but a stage's first.
        whole_layers: whether parameters of one layer stay together.
    """

    least_bytes: int
    whole_layers: bool

    @classmethod
    def of(cls, granularity: Granularity, bucket_bytes: int, *, whole_parameters: bool) -> BucketRule:
        """Parameters that are whole on one copy are packed evenly, which takes many of them: no layer is cut there."""
        by_microbatch = granularity is Granularity.MICROBATCH
        least = min(bucket_bytes, _SMALL_BYTES) if by_microbatch else bucket_bytes
        return cls(least, by_microbatch or whole_parameters)

    def cut(self, items: Sequence[Item]) -> list[range]:
        """Runs of neighbours, each as short as it can be, from the last one on; in order.

        Args:
            items: parameters of one kind, in the order of the stage.
        """
        found, stop, size = [], len(items), 0
        for start in reversed(range(len(items))):
            size += items[start].num_bytes
            inside = self.whole_layers and start > 0 and items[start - 1].layer == items[start].layer
            if size >= self.least_bytes and not inside:
                found.append(range(start, stop))
                stop, size = start, 0
        if stop:
            found.append(range(stop))
        return found[::-1]
