"""`FlatLayout`: several parameters one behind the other in one piece of memory, cut into segments.

elements      |a a a a b b b|b b c c c c .|      equal segments, cut anywhere
parameters    |a a a a c c c c|b b b b b . . .|  every parameter whole in one segment
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Parameters start at multiples of this many elements: kernels like aligned memory.
_ALIGNMENT = 16


@dataclass(frozen=True)
class FlatLayout:
    """Where parameters lie.

    Attributes:
        sizes: elements of each parameter.
        offsets: of each parameter's first element.
        num_segments: of equal length.
        segment_elements: their length.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_segments: int
    segment_elements: int

    @classmethod
    def by_elements(cls, sizes: Sequence[int], num_segments: int) -> FlatLayout:
        """In their order, cut anywhere."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += _aligned(size)
        return cls(tuple(sizes), tuple(offsets), num_segments, _aligned(-(-end // num_segments)))

    @classmethod
    def by_parameters(cls, sizes: Sequence[int], loads: list[int]) -> FlatLayout:
        """Every parameter whole in one segment: the largest first, each where least is so far.

        Args:
            sizes: elements of each parameter.
            loads: what segments of other layouts hold together, the tie-break; what this one adds is added.
        """
        ends, places = [0] * len(loads), [(0, 0)] * len(sizes)
        for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
            segment = min(range(len(loads)), key=lambda s: (ends[s], loads[s], s))
            places[index] = (segment, ends[segment])
            ends[segment] += _aligned(sizes[index])
            loads[segment] += sizes[index]
        length = max(ends, default=0)
        return cls(tuple(sizes), tuple(s * length + start for s, start in places), len(loads), length)

    @property
    def num_elements(self) -> int:
        """Of all segments."""
        return self.num_segments * self.segment_elements

    @property
    def keeps_whole(self) -> bool:
        """Whether no parameter is cut into pieces."""
        return all(
            self.piece(parameter, segment) in ((0, 0), (0, size))
            for parameter, size in enumerate(self.sizes)
            for segment in range(self.num_segments)
        )

    def segment(self, index: int) -> slice:
        """Where a segment lies."""
        return slice(index * self.segment_elements, (index + 1) * self.segment_elements)

    def piece(self, parameter: int, segment: int | None) -> tuple[int, int]:
        """First and last+1 of a parameter's elements that lie in a segment; of no segment, none."""
        if segment is None:
            return 0, 0
        size, offset = self.sizes[parameter], self.offsets[parameter]
        start = min(max(segment * self.segment_elements - offset, 0), size)
        stop = min(max((segment + 1) * self.segment_elements - offset, 0), size)
        return (start, stop) if stop > start else (0, 0)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
