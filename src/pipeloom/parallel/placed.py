"""`Placed`: how a parameter lies on the axes inside a stage: which block of it a process holds.

Axes of `Mesh` that share a stage, such as tp, cut parameters. A process has one block, the same rectangle of elements
along each cut dimension. ZeRO, norms, checkpoints, initialization and optimizers read `Placed` and nothing else.

    qkv of a GPT, cut by heads along dimension 0 into tp = 2          sections of one dimension are cut one by one

        full   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3
        tp 0   q0 q1       | k0 k1       | v0 v1
        tp 1         q2 q3 |       k2 k3 |       v2 v3

    with one key head only (grouped queries), its section has one block, which both hold:

        tp 0   q0 q1       | k0          | v0
        tp 1         q2 q3 | k0          | v0

No torch here, except in functions on tensors.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeloom.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS = "ep"  # the axis along which processes have different experts
_ATTRIBUTE = "placed_block"  # of an nn.Parameter; `pipeloom.models` reads it too


class Section(NamedTuple):
    """Neighbouring elements of a dimension that are cut into equal blocks.

    Attributes:
        size: number of elements.
        blocks: number of blocks, a divisor of the number of members. Fewer blocks than members: neighbouring members
            hold the same block.
    """

    size: int
    blocks: int

    def block(self, member: int, members: int) -> tuple[int, int]:
        """Start and stop within the section of a member's block; the last blocks of an uneven cut are shorter."""
        length = -(-self.size // self.blocks)
        place = member * self.blocks // members
        return min(place * length, self.size), min((place + 1) * length, self.size)


class Cut(NamedTuple):
    """How one dimension is cut.

    Attributes:
        axes: along which members differ; the last one varies fastest.
        sections: of the dimension, in order.
    """

    axes: tuple[str, ...]
    sections: tuple[Section, ...]


class Run(NamedTuple):
    """Elements of one dimension that a block holds: `start` to `stop` in the full parameter, from `local` in the block.

    `owned` is False where a lower member holds the same elements.
    """

    start: int
    stop: int
    local: int
    owned: bool


class Place(NamedTuple):
    """The coordinates of a process and the degrees on the axes inside a stage, by axis."""

    coordinates: Mapping[str, int]
    degrees: Mapping[str, int]

    def member(self, axes: Sequence[str]) -> int:
        """The number of this process among those along `axes`, the last of which varies fastest."""
        number = 0
        for axis in axes:
            number = number * self.degrees.get(axis, 1) + self.coordinates.get(axis, 0)
        return number

    def members(self, axes: Sequence[str]) -> int:
        """Number of processes along `axes`."""
        return math.prod(self.degrees.get(axis, 1) for axis in axes)


@dataclass(frozen=True)
class Placed:
    """How a parameter lies.

    Attributes:
        shape: of the full parameter, as in a model that is not cut.
        cuts: by dimension; dimensions that are missing are whole.
        sum_over: axes whose processes have parts of the gradient of the elements that they hold together: the gradient
            of these elements is the sum. Processes along other axes have the full gradient of what they hold.
        padded: by dimension, the size of a block where blocks are padded with elements that are in no checkpoint.
    """

    shape: tuple[int, ...]
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    sum_over: tuple[str, ...] = ()
    padded: Mapping[int, int] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut the parameter."""
        return tuple(dict.fromkeys(axis for cut in self.cuts.values() for axis in cut.axes))

    def runs(self, dim: int, place: Place) -> tuple[list[Run], int]:
        """What the block of a process holds along a dimension, and its size with padding."""
        cut = self.cuts.get(dim)
        if cut is None:
            return [Run(0, self.shape[dim], 0, True)], self.shape[dim]
        member, members = place.member(cut.axes), place.members(cut.axes)
        runs, offset, local = [], 0, 0
        for section in cut.sections:
            start, stop = section.block(member, members)
            if stop > start:
                lower = member > 0 and section.block(member - 1, members) == (start, stop)
                runs.append(Run(offset + start, offset + stop, local, not lower))
            local += stop - start
            offset += section.size
        return runs, self.padded.get(dim, local)

    def local_shape(self, place: Place) -> tuple[int, ...]:
        """The shape of the block of a process."""
        return tuple(self.runs(dim, place)[1] for dim in range(len(self.shape)))

    def pieces(self, place: Place) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...], bool]]:
        """The rectangles of a block: where each is in the full parameter and in the block, and whether it is owned.

        A rectangle is owned by one of the processes that hold it: the one with the lowest coordinates. Over all
        processes of a stage, owned rectangles are the parameter, each element once.
        """
        first = all(place.coordinates.get(axis, 0) == 0 for axis in place.degrees if axis not in self.axes)
        for runs in product(*(self.runs(dim, place)[0] for dim in range(len(self.shape)))):
            full = tuple(slice(run.start, run.stop) for run in runs)
            local = tuple(slice(run.local, run.local + run.stop - run.start) for run in runs)
            yield full, local, first and all(run.owned for run in runs)

    def cut(self, full: "Tensor", place: Place) -> "Tensor":
        """The block of a process, in new memory; padding is 0.

        Raises:
            InputError: `full` has another shape than the full parameter.
        """
        if tuple(full.shape) != self.shape:
            raise InputError(f"a tensor of shape {list(full.shape)} for a parameter of shape {list(self.shape)}.")
        block = full.new_zeros(self.local_shape(place))
        for there, here, _ in self.pieces(place):
            block[here] = full[there]
        return block

    def join(self, block: "Tensor", place: Place, full: "Tensor", *, owned_only: bool = False) -> None:
        """Copy the block of a process into the full parameter, or only the elements that it owns."""
        for there, here, owned in self.pieces(place):
            if owned or not owned_only:
                full[there] = block[here]


class PlacedBlock(NamedTuple):
    """The block of a parameter that one process holds.

    Attributes:
        how: how the parameter lies.
        place: of the process.
    """

    how: Placed
    place: Place

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full parameter."""
        return self.how.shape

    @property
    def as_stack(self) -> "PlacedBlock":
        """The block of a parameter that has this process's elements of dimension 0 alone: its experts, in full."""
        shape = (self.how.runs(0, self.place)[1], *self.how.shape[1:])
        cuts = {dim: cut for dim, cut in self.how.cuts.items() if dim}
        padded = {dim: size for dim, size in self.how.padded.items() if dim}
        return self._replace(how=replace(self.how, shape=shape, cuts=cuts, padded=padded))

    def cut(self, full: "Tensor") -> "Tensor":
        """The block of a full tensor, in new memory; see `Placed.cut`."""
        return self.how.cut(full, self.place)


def placed(parameter: Any) -> Placed | None:
    """How a parameter lies; None: every process of its stage has all of it, and its full gradient."""
    block = placed_block(parameter)
    return None if block is None else block.how


def placed_block(parameter: Any) -> PlacedBlock | None:
    """The block that this process holds of a parameter; None: it has all of it."""
    found: PlacedBlock | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def is_expert(parameter: Any) -> bool:
    """Whether expert parallelism cuts a parameter: only processes with the same experts are its replicas."""
    block = placed_block(parameter)
    return block is not None and EXPERTS in block.how.axes and block.place.degrees[EXPERTS] > 1


def cut_blocks(named: Iterable[tuple[str, Any]]) -> dict[str, PlacedBlock]:
    """The blocks among named parameters; parameters that are whole on every process are left out."""
    found = ((name, placed_block(parameter)) for name, parameter in named)
    return {name: block for name, block in found if block is not None and block.how.axes}


def place_parameter(parameter: Any, how: Placed, place: Place) -> None:
    """Say how a parameter, which is the block of the process at `place` (`Mesh.place`) already, lies.

    Raises:
        InputError: the parameter has another shape than this block, or an axis is unknown at `place`.
    """
    block = PlacedBlock(how, place)
    for axis in (*how.axes, *how.sum_over):
        if axis not in place.degrees:
            raise InputError(
                f"a parameter lies on axis {axis!r}: the axes inside a stage are {', '.join(place.degrees)}. Use "
                "these, or divide the mesh with Mesh.divide."
            )
    if tuple(parameter.shape) != how.local_shape(place):
        raise InputError(
            f"a parameter of shape {list(parameter.shape)}: its block of {list(how.shape)} has shape "
            f"{list(how.local_shape(place))} here. Pass the block, not the full parameter."
        )
    setattr(parameter, _ATTRIBUTE, block)


def forget_block(parameter: Any) -> None:
    """Undo `place_parameter`, if it was called."""
    vars(parameter).pop(_ATTRIBUTE, None)


def even(size: int, blocks: int, axes: Sequence[str]) -> Cut:
    """A dimension of `size` elements in `blocks` equal blocks along `axes`."""
    return Cut(tuple(axes), (Section(size, blocks),))
