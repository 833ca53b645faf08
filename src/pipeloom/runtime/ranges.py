"""Parts of a parameter: the consecutive elements that one process keeps of it. No torch here."""

from __future__ import annotations

import math
from typing import NamedTuple


class Range(NamedTuple):
    """Elements `start` to `stop` of a parameter of `shape`, flattened row by row; none where the two are equal."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.start == 0 and self.stop == math.prod(self.shape)
