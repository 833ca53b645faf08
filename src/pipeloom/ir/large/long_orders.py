"""Integers of long orders (`pipeloom.ir.order.Order`), made by numpy."""

from array import array
from collections.abc import Sequence

import numpy as np


def in_turn(counts: Sequence[range]) -> bytes:
    """The first integers of all ranges, then the second ones, and so on. The ranges are equally long."""
    columns = [np.arange(numbers.start, numbers.stop, numbers.step, dtype=np.int64) for numbers in counts]
    return np.stack(columns, axis=1).tobytes()


def increased(codes: "array[int]", step: int) -> bytes:
    """Every integer plus `step`."""
    return (np.frombuffer(codes, np.int64) + step).tobytes()
