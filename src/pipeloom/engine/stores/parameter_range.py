"""`Range`: which elements of a parameter a process updates. No torch here."""

from __future__ import annotations

import math
from typing import NamedTuple


class Range(NamedTuple):
    """A main parameter with elements `start` to before `stop` of a parameter of `shape`, flattened row by row."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.start == 0 and self.stop == math.prod(self.shape)
