"""`Range`: the elements of a parameter that a process updates. No torch here."""

import math
from typing import NamedTuple


class Range(NamedTuple):
    """Elements `start` to before `stop` of a parameter of `shape`, flattened row by row."""

    start: int
    stop: int
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of these elements."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether these are all elements of the parameter."""
        return self.start == 0 and self.stop == math.prod(self.shape)
