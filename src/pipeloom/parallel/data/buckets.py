"""Which parameters of a stage form a unit, to be gathered and reduced together.

Every collective has a start-up cost: processes wait for each other and threads wake up. A model with hundreds of small
layers must not pay it hundreds of times per step. A model with a few large layers must not delay its reductions until
all gradients are computed. So parameters go into buckets, as in PyTorch's DDP (Li et al., VLDB 2020, section 3.2.3),
filled from the last layer to the first, in the order in which backwards finish them. The remainder is the first bucket,
which forwards wait for and no backward overlaps.

At granularity microbatch, every forward and backward gathers layers, so a bucket is also the unit of memory. There
layers are not cut, and only small layers share a bucket.

No torch here: runs and predictions (`pipeloom.plan.memory`) use this file.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from pipeloom.ir import Granularity

# The minimum size of a bucket at granularity microbatch. Below it the start-up of a collective exceeds its transfer.
_SMALL_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter of a stage, and the layers and stages that read it.

    Attributes:
        name: the canonical name.
        num_bytes: of the parameter, in the format of forwards.
        layers: numbers of the stage's layers that read it; (-1,) for a parameter outside all layers.
        stages: all stages that hold it.
        kind: parameters of different kinds never share a unit: number format, device, whether they are trained or are
            experts of other replicas.
    """

    name: str
    num_bytes: int
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    kind: Hashable = None


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
    def of(cls, granularity: Granularity, bucket_bytes: int, *, whole_parameters: bool) -> Self:
        """The buckets of a granularity; `whole_parameters`: layers stay whole, to be spread evenly over replicas."""
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
