"""Seconds of collectives inside a stage that pass while the device computes. No torch here.

A device's link carries one collective at a time. What a layout begins early:

    ring            keys and values of the next hop, during this one; gradients, during the hop after theirs. The last
                    gradients travel home when nothing is left to compute.
    ring-self-attention   the keys or values of the next rank, during the product with this one's
    2d, 2.5d        the blocks of the next product, during this one
"""

from typing import NamedTuple


class RingSeconds(NamedTuple):
    """One layer of ring attention on one process.

    Attributes:
        hops: number of processes.
        compute: of one hop, forward.
        keys: of one shift of keys and values.
        gradients: of one shift of their gradients.
    """

    hops: int
    compute: float
    keys: float
    gradients: float

    def forward(self) -> float:
        """Hidden seconds of a forward."""
        return (self.hops - 1) * min(self.keys, self.compute)

    def backward(self) -> float:
        """Hidden seconds of a backward, which computes twice as long."""
        compute, found = 2 * self.compute, 0.0
        for hop in range(self.hops):
            travelling = (self.keys if hop < self.hops - 1 else 0.0) + (self.gradients if hop >= 2 else 0.0)
            found += min(compute, travelling)
        return found


def passes_hidden(hops: int, compute: float, shift: float) -> float:
    """Hidden seconds of a forward or backward of ring self-attention: two passes, each with one product per hop.

    Args:
        hops: number of processes.
        compute: seconds of all products of one pass.
        shift: seconds of one shift.
    """
    return 2 * (hops - 1) * min(shift, compute / hops)


def products_hidden(side: int, compute: float, broadcasts: float) -> float:
    """Hidden seconds of one product of matrices on a q x q grid.

    Args:
        side: q.
        compute: seconds of the whole product.
        broadcasts: seconds of all its broadcasts.
    """
    return (side - 1) / side * min(compute, broadcasts)
