"""Which parameters of a stage form a unit, to be gathered and reduced together, and how a unit lies in flat memory.

Every collective has a start-up cost: processes wait for each other and threads wake up. A model with hundreds of small
layers must not pay it hundreds of times per step. A model with a few large layers must not delay its reductions until
all gradients are computed. So parameters go into buckets, as in PyTorch's DDP (Li et al., VLDB 2020, section 3.2.3),
filled from the last layer to the first, in the order in which backwards finish them. The remainder is the first bucket,
which forwards wait for and no backward overlaps.

At granularity microbatch, every forward and backward gathers layers, so a bucket is also the unit of memory. There
layers are not cut, and only small layers share a bucket.

The parameters of a unit lie in one flat tensor, which is cut into equal segments:

    elements      |a a a a b b b|b b c c c c .|      cut anywhere
    parameters    |a a a a c c c c|b b b b b . . .|  no parameter is cut

No torch here: runs and predictions (`pipeloom.plan.memory`) use this file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from pipeloom.ir import DataAxis, DataStrategy, Granularity

if TYPE_CHECKING:
    from torch import Size, Tensor

# The minimum size of a bucket at granularity microbatch. Below it the start-up of a collective exceeds its transfer.
_SMALL_BYTES = 1 << 20
# Parameters start at multiples of this many elements: kernels are faster on aligned memory.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class BucketRule:
    """The size of buckets.

    Attributes:
        least_bytes: minimum size of every bucket but a stage's first.
        whole_layers: whether the parameters of one layer stay together.
    """

    least_bytes: int
    whole_layers: bool

    @classmethod
    def of(cls, granularity: Granularity, bucket_bytes: int, *, whole_parameters: bool) -> BucketRule:
        """With `whole_parameters`, layers are not cut: only many parameters spread evenly over replicas."""
        by_microbatch = granularity is Granularity.MICROBATCH
        least = min(bucket_bytes, _SMALL_BYTES) if by_microbatch else bucket_bytes
        return cls(least, by_microbatch or whole_parameters)

    def cut(self, items: Sequence[ParameterUse]) -> list[range]:
        """Runs of neighbours, each as short as the rule allows, cut from the last parameter on; in ascending order.

        The parameters are of one kind and each in one layer, in the order of the stage.
        """
        found, stop, size = [], len(items), 0
        for start in reversed(range(len(items))):
            size += items[start].num_bytes
            inside = self.whole_layers and start > 0 and items[start - 1].layers == items[start].layers
            if size >= self.least_bytes and not inside:
                found.append(range(start, stop))
                stop, size = start, 0
        if stop:
            found.append(range(stop))
        return found[::-1]


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter of a stage, and the layers and stages that read it.

    Attributes:
        name: the canonical name.
        num_bytes: of the parameter, in the format of forwards.
        layers: numbers of the stage's layers that read it; (-1,) for a parameter outside all layers.
        stages: all stages that hold it.
        kind: parameters of different kinds never share a unit: number format, device, whether they are trained.
    """

    name: str
    num_bytes: int
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    kind: Hashable = None


def group_parameters(parameters: Sequence[ParameterUse], rule: BucketRule) -> list[list[int]]:
    """The units of a stage, as positions in `parameters`, which are in the order of the stage.

    Parameters that the same several stages hold form a unit of their own, so that each of the stages lays them out
    alike. So do parameters that the same several layers of this stage read: other layers need not gather them. The
    rest goes into buckets.
    """
    apart: dict[Hashable, list[int]] = {}
    rows: dict[Hashable, list[int]] = {}
    for position, use in enumerate(parameters):
        if len(use.stages) > 1:
            apart.setdefault(("stages", use.stages, use.kind), []).append(position)
        elif len(use.layers) > 1:
            apart.setdefault(("layers", use.layers, use.kind), []).append(position)
        else:
            rows.setdefault(use.kind, []).append(position)
    units = [sorted(group, key=lambda position: parameters[position].name) for group in apart.values()]
    for row in rows.values():
        buckets = rule.cut([parameters[position] for position in row])
        units += [[row[index] for index in bucket] for bucket in buckets]
    return units


def units_by_layer(units: Sequence[Sequence[ParameterUse]], num_layers: int) -> tuple[tuple[int, ...], ...]:
    """For each layer of a stage, the numbers of the units that must be gathered while it runs.

    A unit of neighbouring layers stays gathered from the first of them to the last, also in a layer between them that
    has none of its parameters. A unit that several layers share is needed in these layers only.
    """
    found: list[list[int]] = [[] for _ in range(num_layers)]
    for number, unit in enumerate(units):
        layers = {layer for use in unit for layer in use.layers if layer >= 0}
        if layers and all(len(use.layers) == 1 for use in unit):
            layers = set(range(min(layers), max(layers) + 1))
        for layer in layers:
            found[layer].append(number)
    return tuple(map(tuple, found))


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
        if not data.shards_optimizer or data.strategy.has_server:
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
