"""Slices of equal arithmetic, as Seq1F1B cuts sequences (arXiv:2406.03488)."""

import math

from pipeloom.plan.slicing.slicer import cut


def equal_work(*, sequence: int, num_slices: int, width: int, multiple: int = 1) -> tuple[int, ...]:
    """Slices with equal arithmetic in a transformer of this width: later slices are shorter.

    The token at position x costs 24 times width squared multiplications and additions in matrices, and ``4 x width`` in
    causal attention. The first x tokens cost its integral, which is cut into equal parts. Seq1F1B computes the same
    slices from the end.
    """
    matrices = 24 * width  # over 4 width, as 2 x**2 width is
    total = matrices * sequence + 2 * sequence**2
    parts = [
        (math.sqrt(matrices**2 + 8 * total * index / num_slices) - matrices) / 4 / sequence
        for index in range(1, num_slices)
    ]
    return cut(parts, sequence=sequence, multiple=multiple)
