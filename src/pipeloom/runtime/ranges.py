"""`Range`: which elements of a parameter a process updates."""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """A main parameter with elements `start` to before `stop` of a parameter of `shape`, flattened row by row."""

    start: int
    stop: int
    shape: tuple[int, ...]
