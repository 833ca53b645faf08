"""Slicings that need no costs: equal lengths, or equal arithmetic."""

from __future__ import annotations

import math

from pipeloom.errors import InputError


def uniform(*, sequence: int, num_slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Slices whose lengths differ by at most one multiple; the last one may end short of a multiple.

    Raises:
        InputError: more slices than multiples in the sequence.
    """
    return _cut(sequence, num_slices, multiple, [index / num_slices for index in range(num_slices + 1)])


def balanced(
    *, sequence: int, num_slices: int, width: int, mlp_ratio: float = 4.0, multiple: int = 1
) -> tuple[int, ...]:
    """Slices with equal arithmetic in a transformer of this width: later slices are shorter.

    The token at position x costs ``8 + 4 mlp_ratio`` times width squared multiplications and additions in matrices, and
    ``4 x width`` in causal attention. The first x tokens cost its integral, which is cut into equal parts. Seq1F1B
    (arXiv:2406.03488) computes the same slices from the end.

    Raises:
        InputError: more slices than multiples in the sequence, or a width below 1.
    """
    if width < 1 or not 0 <= mlp_ratio < math.inf:
        raise InputError(
            f"width={width}, mlp_ratio={mlp_ratio}: the width must be at least 1, the ratio from 0 and finite. Use the "
            "sizes of the model."
        )
    matrices = (8 + 4 * mlp_ratio) * width  # over 4 width, as 2 x**2 width is
    total = matrices * sequence + 2 * sequence**2
    parts = [
        (math.sqrt(matrices**2 + 8 * total * index / num_slices) - matrices) / 4 / sequence
        for index in range(num_slices + 1)
    ]
    return _cut(sequence, num_slices, multiple, parts)


def _cut(sequence: int, num_slices: int, multiple: int, parts: list[float]) -> tuple[int, ...]:
    """Slices that end nearest to these fractions of the sequence; none is empty."""
    if sequence < 1 or multiple < 1 or not 1 <= num_slices <= -(-sequence // multiple):
        raise InputError(
            f"num_slices={num_slices}: {sequence} tokens in multiples of {multiple} make from 1 to "
            f"{max(0, -(-sequence // max(1, multiple)))} slices. Use a number in this range."
        )
    cells = -(-sequence // multiple)
    ends = [0]
    for index in range(1, num_slices):
        wanted = math.floor(parts[index] * sequence / multiple + 0.5)
        ends.append(min(max(wanted, ends[-1] + 1), cells - (num_slices - index)))
    return tuple(
        min(end * multiple, sequence) - start * multiple for start, end in zip(ends, [*ends[1:], cells], strict=True)
    )
