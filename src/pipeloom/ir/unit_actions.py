"""When each unit of a stage is gathered, freed and reduced.

The parameters of a stage are gathered and reduced in units: some neighbouring layers, or a part of one. The actions of
a program name stages; this file adds the layer at which each unit is gathered, freed and reduced. A stage of three
layers with units 0, 1 and 2, under zero3:

    granularity step     0UNSHARD       gather 0 1 2
    and chunk            0F0            layer 0 | layer 1 | layer 2
                         0B0            layer 2 | reduce 2, layer 1 | reduce 1, layer 0 | reduce 0
                         0RESHARD       free 0 1 2
                         0REDUCE_GRAD0

    granularity          0UNSHARD       gather 0
    microbatch           0F0            gather 1, layer 0 | free 0, gather 2, layer 1 | free 1, layer 2 | free 2
                         0RESHARD
                         0UNSHARD       gather 2
                         0B0            gather 1, layer 2 | free 2, reduce 2, gather 0, layer 1 | free 1, reduce 1,
                                        layer 0
                         0RESHARD       free 0
                         0REDUCE_GRAD0  reduce 0

A layer starts once its units have arrived. I gathers as B does; W needs no parameters. Only the last backward (B or W)
before a REDUCE_GRAD reduces units; the REDUCE_GRAD reduces the rest. An offloaded shard is read (RELOAD) before its
unit is gathered: from the UNSHARD on, at granularity microbatch two layers ahead.

The executor runs these actions (`pipeloom.parallel.data.layer_hooks`), memory estimates count their bytes
(`pipeloom.plan.memory`), and the simulator times them for equal units (`pipeloom.sim.background`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.ir.action import Op
from pipeloom.ir.data_axis import DataAxis, Granularity


class UnitAction(NamedTuple):
    """A unit is gathered (UNSHARD), freed (RESHARD), reduced (REDUCE_GRAD), or its offloaded shard is read (RELOAD)."""

    op: Op
    unit: int


@dataclass(frozen=True, slots=True)
class UnitActions:
    """The unit actions of one F, B or I, and of the stage's UNSHARD, RESHARD and REDUCE_GRAD around it.

    Attributes:
        unshard: in the UNSHARD before the computation.
        at_layer: for each layer, directly before the layer computes, once its units have arrived.
        end: after the last layer; for a backward that gathers inside, in the RESHARD and REDUCE_GRAD after it.
    """

    unshard: tuple[UnitAction, ...]
    at_layer: tuple[tuple[UnitAction, ...], ...]
    end: tuple[UnitAction, ...]


def gathers_inside(data: DataAxis) -> bool:
    """Whether computations themselves gather the next unit and free the previous one."""
    return data.strategy.shards_parameters and data.granularity is Granularity.MICROBATCH


def unit_actions(
    layers: Sequence[Sequence[int]], num_units: int, data: DataAxis, *, forward: bool, offloaded: Collection[int] = ()
) -> UnitActions:
    """The unit actions of one computation.

    Args:
        layers: for each layer of the stage, the units that it reads.
        num_units: units of the stage. UNSHARD gathers, and RESHARD frees, units that no layer reads.
        data: the data axis.
        forward: F rather than B or I.
        offloaded: units whose shards are offloaded.
    """
    inside, runs = gathers_inside(data), _runs(layers)
    if not forward:
        runs.reverse()
    walk = _Walk(frozenset(offloaded))
    first = {unit: index for index, layer in reversed(list(enumerate(layers))) for unit in layer}
    outside = [unit for unit in range(num_units) if unit not in first]

    def units(number: int) -> Sequence[int]:
        return layers[runs[number][0]] if number < len(runs) else ()

    begun = [*outside, *units(0)] if inside else range(num_units)
    unshard = [action for unit in begun for action in (walk.read([unit]) or walk.gather([unit]))]
    unshard += walk.read(units(1)) if inside else []
    at_layer: list[tuple[UnitAction, ...]] = [()] * len(layers)
    to_reduce = [] if forward else list(range(num_units))

    def reduce(done: int) -> Iterator[UnitAction]:
        """Reduce the units of layers from `done` on, in the same order on all replicas."""
        while to_reduce and first.get(to_reduce[-1], -1) >= done:
            yield UnitAction(Op.REDUCE_GRAD, to_reduce.pop())

    for number, (low, high) in enumerate(runs):
        actions = walk.gather(units(number) if number else (*outside, *units(0)))  # UNSHARD only read offloaded units
        if number and inside:
            actions += walk.free(unit for unit in units(number - 1) if unit not in units(number))
        if number:
            actions += reduce(runs[number - 1][0])
        ahead = units(number + 1)
        actions += walk.gather(ahead if inside else [unit for unit in ahead if unit in walk.offloaded])
        actions += walk.read(units(number + 2)) if inside else []
        at_layer[low if forward else high] = tuple(actions)
    end = walk.free([unit for unit in walk.there if not forward or unit in first]) if inside else []
    return UnitActions(tuple(unshard), tuple(at_layer), (*end, *reduce(-1)))


class _Walk:
    """The units gathered and read so far in a computation."""

    def __init__(self, offloaded: frozenset[int]) -> None:
        self.offloaded = offloaded
        self.there: dict[int, None] = {}
        self._read: set[int] = set()

    def read(self, units: Sequence[int]) -> list[UnitAction]:
        new = [unit for unit in units if unit in self.offloaded - self._read - self.there.keys()]
        self._read.update(new)
        return [UnitAction(Op.RELOAD, unit) for unit in new]

    def gather(self, units: Sequence[int]) -> list[UnitAction]:
        new = [unit for unit in units if unit not in self.there]
        self.there.update(dict.fromkeys(new))
        self._read.difference_update(new)
        return [UnitAction(Op.UNSHARD, unit) for unit in new]

    def free(self, units: Iterator[int] | Sequence[int]) -> list[UnitAction]:
        gone = [unit for unit in units if unit in self.there]
        for unit in gone:
            del self.there[unit]
        return [UnitAction(Op.RESHARD, unit) for unit in gone]


def _runs(layers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """First and last layer of each run of layers that read the same units. A layer without units is in the run before.

    The first layer of a run says which units it reads, so layers without units in front are in no run.
    """
    runs: list[tuple[int, int]] = []
    for index, units in enumerate(layers):
        if runs and (not units or set(units) == set(layers[runs[-1][0]])):
            runs[-1] = (runs[-1][0], index)
        elif units:
            runs.append((index, index))
    return runs
