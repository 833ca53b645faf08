"""`Box`: a rectangle of elements of a tensor, as blocks of parameters that several ranks share are stored. No torch.

NAME[0:2,4:8] of shape [4, 8]      . . . . x x x x
                                   . . . . x x x x
                                   . . . . . . . .
                                   . . . . . . . .
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError

T = TypeVar("T")


class Box(NamedTuple):
    """Elements `starts` to before `stops` along each dimension of a tensor of `shape`."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """All elements."""
        return cls((0,) * len(shape), tuple(shape), tuple(shape))

    @classmethod
    def of(cls, slices: Sequence[slice], shape: Sequence[int]) -> Box:
        """The elements that slices with start and stop select."""
        return cls(tuple(s.start for s in slices), tuple(s.stop for s in slices), tuple(shape))

    @classmethod
    def from_json(cls, row: Sequence[Sequence[int]]) -> Box:
        """What `json` made of a box. Raises ValueError where it is none."""
        starts, stops, shape = (tuple(map(int, each)) for each in row)
        bounds = zip(starts, stops, shape, strict=True)
        if not all(0 <= start < stop <= size for start, stop, size in bounds):
            raise ValueError(f"a block from {list(starts)} to {list(stops)} of shape {list(shape)}")
        return cls(starts, stops, shape)

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.extents)

    @property
    def is_full(self) -> bool:
        """Whether these are all elements of the tensor."""
        return self.extents == self.shape

    def within(self, other: Box) -> Box | None:
        """The elements that both have."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
            return None
        return self._replace(starts=starts, stops=stops)

    def slices_in(self, other: Box | None = None) -> tuple[slice, ...]:
        """Where these elements are in a tensor with the elements of `other`; None: in the full tensor."""
        first = (0,) * len(self.shape) if other is None else other.starts
        rows = zip(self.starts, self.stops, first, strict=True)
        return tuple(slice(start - origin, stop - origin) for start, stop, origin in rows)

    def __str__(self) -> str:
        return ",".join(f"{start}:{stop}" for start, stop in zip(self.starts, self.stops, strict=True))


def boxes_of(part: Range) -> Iterator[Box]:
    """The elements of a range as boxes, in order: of n dimensions at most 2 n - 1, neighbours in flat memory."""
    for starts, stops in _corners(part.start, part.stop, part.shape):
        yield Box(starts, stops, part.shape)


def _corners(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start >= stop:
        return
    if (start, stop) == (0, math.prod(shape)):
        yield (0,) * len(shape), shape
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row  # rows from `first` on that are not cut at their start, before `last`
    if start % row or first == last:
        end = min((first + 1) * row, stop)
        for starts, stops in _corners(start - first * row, end - first * row, shape[1:]):
            yield (first, *starts), (first + 1, *stops)
        first += 1
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last, *shape[1:])
    if last >= first and stop % row:
        for starts, stops in _corners(0, stop - last * row, shape[1:]):
            yield (last, *starts), (last + 1, *stops)


def cover_box(name: str, boxes: Iterable[tuple[Box, T]], wanted: Box) -> list[tuple[T, Box, Box]]:
    """What has elements of a box: each with its own box, and the elements that both have.

    Raises:
        CheckpointError: an element is in none or in several.
    """
    found = [(what, box, common) for box, what in boxes if (common := box.within(wanted)) is not None]
    found.sort(key=lambda each: each[2].starts)
    doubled = any(
        common.within(other) is not None
        for number, (_, _, common) in enumerate(found)
        for _, _, other in _touching(found[number + 1 :], common)
    )
    if doubled or sum(common.num_elements for _, _, common in found) != wanted.num_elements:
        raise CheckpointError(
            f"elements of {name} in [{wanted}] are missing or duplicated in the checkpoint. Use another checkpoint."
        )
    return found


def _touching(later: Sequence[tuple[T, Box, Box]], box: Box) -> Iterator[tuple[T, Box, Box]]:
    """The entries of `later`, sorted by start, that begin before `box` ends along the first dimension."""
    for each in later:
        if each[2].starts and each[2].starts[0] >= box.stops[0]:
            return
        yield each
