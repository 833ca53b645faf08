"""`Range`: the elements of a parameter that a process updates. No torch here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Range(NamedTuple):
    """Elements `start` to before `stop` of a parameter of `shape`, flattened row by row."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Range:
        """What `json` made of a range. Raises ValueError or TypeError where it is none."""
        first, last, sizes = row
        start, stop, shape = int(first), int(last), tuple(map(int, sizes))
        if any(size < 0 for size in shape) or not 0 <= start <= stop <= math.prod(shape):
            raise ValueError(f"elements {start} to {stop} of shape {list(shape)}")
        return cls(start, stop, shape)

    @property
    def num_elements(self) -> int:
        """Number of these elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.start == 0 and self.stop == math.prod(self.shape)
