"""How the parameters of a unit lie in flat memory.

The parameters of a unit lie in one flat tensor, which is cut into equal segments:

    elements      |a a a a b b b|b b c c c c .|      cut anywhere
    parameters    |a a a a c c c c|b b b b b . . .|  no parameter is cut

No torch here: runs and predictions (`pipeloom.plan.memory`) use this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from pipeloom.ir import DataAxis, DataStrategy

if TYPE_CHECKING:
    from torch import Size, Tensor

# Parameters start at multiples of this many elements: kernels are faster on aligned memory.
_ALIGNMENT = 16


def own_segment(strategy: DataStrategy, replica: int) -> int | None:
    """The segment that a replica updates; None: it updates nothing."""
    match strategy:
        case DataStrategy.DDP:
            return 0
        case DataStrategy.PARAMETER_SERVER:
            return 0 if replica == 0 else None
        case DataStrategy.ZERO1 | DataStrategy.ZERO2 | DataStrategy.ZERO3:
            return replica
        case _:
            assert_never(strategy)


def expert_axis(data: DataAxis, degree: int, *, offloads: bool) -> DataAxis:
    """The data axis of experts, which fewer replicas share.

    A replica that shares its experts with no other one, without masters and offload, updates the parameters that it
    computes with: zero3 would keep two copies of them.

    Args:
        data: of all replicas.
        degree: number of replicas with the same experts.
        offloads: whether main parameters are offloaded.
    """
    is_copied = degree > 1 or data.separate_master or offloads
    strategy = data.strategy if is_copied or not data.strategy.shards_parameters else DataStrategy.ZERO2
    return replace(data, degree=degree, strategy=strategy)


@dataclass(frozen=True)
class FlatLayout:
    """The offsets of the parameters of one unit.

    Attributes:
        sizes: elements of each parameter.
        offsets: first element of each parameter.
        num_segments: number of segments, all of one length.
        segment_elements: elements per segment.
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    num_segments: int
    segment_elements: int

    @classmethod
    def of_unit(cls, sizes: Sequence[int], data: DataAxis, loads: list[int] | None) -> FlatLayout:
        """The layout of a unit under a data strategy.

        Args:
            sizes: elements of each parameter.
            data: one segment per replica where replicas update different elements, else one segment.
            loads: for layout "parameters", the elements that each replica owns so far (see `by_parameters`).
        """
        if not data.strategy.shards_optimizer or data.strategy.has_server:
            return cls.by_elements(sizes, 1)
        return cls.by_elements(sizes, data.degree) if loads is None else cls.by_parameters(sizes, loads)

    @classmethod
    def by_elements(cls, sizes: Sequence[int], num_segments: int) -> FlatLayout:
        """Parameters in their order, cut anywhere."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += _aligned(size)
        return cls(tuple(sizes), tuple(offsets), num_segments, _aligned(-(-end // num_segments)))

    @classmethod
    def by_parameters(cls, sizes: Sequence[int], loads: list[int]) -> FlatLayout:
        """Uncut parameters: from the largest on, each goes into the segment with the fewest elements.

        `loads` has the elements per segment in the layouts before this one, which break ties. This layout's are added.
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
        """Elements of all segments, with gaps."""
        return self.num_segments * self.segment_elements

    @property
    def keeps_whole(self) -> bool:
        """Whether no parameter is cut."""
        return all(
            self.shard(parameter, segment) in ((0, 0), (0, size))
            for parameter, size in enumerate(self.sizes)
            for segment in range(self.num_segments)
        )

    def segment(self, index: int) -> slice:
        """The elements of a segment."""
        return slice(index * self.segment_elements, (index + 1) * self.segment_elements)

    def shard(self, parameter: int, segment: int | None) -> tuple[int, int]:
        """First and last+1 of a parameter's elements that lie in a segment; (0, 0) for no segment."""
        if segment is None:
            return 0, 0
        size, offset = self.sizes[parameter], self.offsets[parameter]
        start = min(max(segment * self.segment_elements - offset, 0), size)
        stop = min(max((segment + 1) * self.segment_elements - offset, 0), size)
        return (start, stop) if stop > start else (0, 0)

    def views(self, flat: Tensor, shapes: Sequence[Size]) -> list[Tensor]:
        """Every full parameter, as a view of a flat tensor with all segments."""
        places = zip(self.offsets, self.sizes, shapes, strict=True)
        return [flat[offset : offset + size].view(shape) for offset, size, shape in places]

    def shards(self, own: Tensor, segment: int | None) -> list[Tensor]:
        """The shard of every parameter, as a view of the flat tensor `own` of one segment."""
        first = 0 if segment is None else segment * self.segment_elements
        found = []
        for index, offset in enumerate(self.offsets):
            start, stop = self.shard(index, segment)
            found.append(own[offset + start - first : offset + stop - first] if stop > start else own[:0])
        return found


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
