"""`MeshBlocks`: what the processes inside a stage exchange about parameters that they share, as `Placed` says.

gradient_sum    all-reduces gradients of elements that several processes hold, one flat all-reduce per group of
                processes and dtype at the end of a step
join, cut       full parameters for `state_dict` and `load_state_dict`
owned           the elements that count in norms
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.blocks import Blocks, BlockSum, Gradients
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import Place, PlacedBlock, placed_block
from pipeloom.parallel.tensor.one_d.logits import full_logits
from pipeloom.transport.values import Value

# Some elements of a flattened parameter: runs of neighbours or, where these are many, positions. None: all.
_Elements = list[slice] | Tensor | None
_MOST_RUNS = 16


class _Part(NamedTuple):
    """Elements of a parameter whose gradients several processes sum.

    Attributes:
        number: of the parameter among those that are summed.
        elements: see `_Elements`.
    """

    number: int
    elements: _Elements


class MeshBlocks(Blocks):
    """The blocks of parameters on axis tp of a mesh, or the axes into which it is divided; those of experts on ep too.

    Args:
        mesh: of all processes.
        sharded: whether data-parallel replicas have shards of the blocks.
    """

    divides = True

    def __init__(self, mesh: Mesh, *, sharded: bool) -> None:
        self._mesh, self._sharded = mesh, sharded
        self.lines = mesh.lines("tp")
        self.leads = not any(mesh.place.coordinates.values())
        self._owned: dict[nn.Parameter, _Elements] = {}

    def full_shape(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
        block = placed_block(parameter)
        return shape if block is None else block.full_shape

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        block = placed_block(parameter)
        return full if block is None else block.cut(full)

    @torch.no_grad()
    def join(self, parameter: nn.Parameter, block: Tensor, *, as_stack: bool = False) -> Tensor:
        own = placed_block(parameter)
        if own is not None and as_stack:
            own = own.as_stack
        if own is None or not own.how.axes:
            return block
        how, axes = own.how, own.how.axes
        members = _members(own, axes)
        shapes = [how.local_shape(place) for place in members]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        sent = block.new_zeros(max(sizes))
        sent[: block.numel()] = block.reshape(-1)
        rows = self._mesh.axis(*axes).all_gather(sent).view(len(members), -1)
        full = block.new_zeros(how.shape)
        for place, shape, size, row in zip(members, shapes, sizes, rows, strict=True):
            how.join(row[:size].view(shape), place, full)
        return full

    def common(self, number: int) -> int:
        return int(self._mesh.axis("tp").broadcast(torch.tensor([number]), 0))

    def full_output(self, output: Value) -> Value:
        return full_logits(output)

    def owned(self, parameter: nn.Parameter, values: Tensor, span: Range | None) -> list[Tensor]:
        if parameter not in self._owned:
            block = placed_block(parameter)
            if block is None:
                self._owned[parameter] = None if self.leads else []
            else:
                pieces = [here for _, here, owned in block.how.pieces(block.place) if owned]
                self._owned[parameter] = _elements(block, pieces, span)
        elements = self._owned[parameter]
        return [values] if elements is None else _taken(values, elements)

    def leave(self) -> None:
        self._mesh.leave("tp")
        self._mesh.leave("ep")

    def sum(self, values: Tensor) -> Tensor:
        return self._mesh.axis("tp").all_reduce(values)

    def gradient_sum(
        self, parameters: Mapping[str, nn.Parameter], ranges: Mapping[str, Range], dtype: Callable[[str], torch.dtype]
    ) -> BlockSum | None:
        summed: list[nn.Parameter] = []
        groups: dict[tuple[tuple[int, ...], str, torch.dtype], list[_Part]] = {}
        for name, parameter in parameters.items():
            block = placed_block(parameter)
            if block is None:
                continue
            if self._sharded:
                _check_equal_blocks(name, block)
            if not block.how.sum_over or not parameter.requires_grad:
                continue
            held: dict[tuple[int, ...], list[tuple[slice, ...]]] = {}
            for here, members in self._holders(block):
                held.setdefault(members, []).append(here)
            for members, pieces in held.items():
                elements = _elements(block, pieces, ranges.get(name))
                if len(members) > 1 and parameter.numel() and (elements is None or len(elements)):
                    key = members, "+".join(block.how.sum_over), dtype(name)
                    groups.setdefault(key, []).append(_Part(len(summed), elements))
            summed.append(parameter)
        if not groups:
            return None
        sums = [
            (self._mesh.axis_between(members, axes), kind, parts) for (members, axes, kind), parts in groups.items()
        ]
        return BlockSum(summed, lambda gradients: _total(summed, sums, gradients))

    def _holders(self, block: PlacedBlock) -> list[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """For each rectangle of a block, where it is there, and the processes along `sum_over` that have it too."""
        how, axes = block.how, block.how.sum_over
        ranks = self._mesh.line(*axes)
        others = [[there for there, _, _ in how.pieces(place)] for place in _members(block, axes)]
        return [
            (here, tuple(rank for rank, pieces in zip(ranks, others, strict=True) if there in pieces))
            for there, here, _ in how.pieces(block.place)
        ]


def _members(block: PlacedBlock, axes: Sequence[str]) -> list[Place]:
    """The places of all processes that differ from this one on `axes` alone, in the order of `Mesh.axis(*axes)`."""
    own = block.place
    values = product(*(range(own.degrees[axis]) for axis in axes))
    return [own._replace(coordinates={**own.coordinates, **dict(zip(axes, found, strict=True))}) for found in values]


def _elements(block: PlacedBlock, pieces: Sequence[tuple[slice, ...]], span: Range | None) -> _Elements:
    """The elements of rectangles of a block in a parameter that holds a `span` of the flattened block."""
    shape = block.how.local_shape(block.place)
    inside = torch.zeros(shape, dtype=torch.bool)
    for piece in pieces:
        inside[piece] = True
    flat = inside.view(-1) if span is None else inside.view(-1)[span.start : span.stop]
    if bool(flat.all()):
        return None
    changes = torch.diff(flat.to(torch.int8), prepend=flat.new_zeros(1), append=flat.new_zeros(1)).nonzero().view(-1)
    if len(changes) <= 2 * _MOST_RUNS:
        ends = iter(changes.tolist())
        return [slice(start, stop) for start, stop in zip(ends, ends, strict=True)]
    return flat.nonzero().view(-1)


def _taken(values: Tensor, elements: _Elements) -> list[Tensor]:
    """Elements of a tensor, in one or several tensors of one dimension."""
    flat = values.reshape(-1)
    if elements is None:
        return [flat]
    if isinstance(elements, Tensor):
        return [flat[elements.to(flat.device)]]
    return [flat[run] for run in elements]


def _check_equal_blocks(name: str, block: PlacedBlock) -> None:
    """Raises InputError where blocks of different sizes are sharded: processes would shard common parameters apart."""
    shapes = {block.how.local_shape(place) for place in _members(block, tuple(block.place.degrees))}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise InputError(
            f"parameter {name!r} lies in blocks of shapes {list(first)} and {list(second)}: data-parallel shards need "
            "blocks of one shape. Pad them, or use data='ddp'."
        )


def _total(
    parameters: Sequence[nn.Parameter], sums: Sequence[tuple[Axis, torch.dtype, list[_Part]]], gradients: Gradients
) -> Gradients:
    """Gradients with the sums over the members of each axis in place of its parts; None where no member has one."""
    found = list(gradients)
    for axis, dtype, parts in sums:
        present, row, sizes = [], [], []
        for number, elements in parts:
            parameter, gradient = parameters[number], found[number]
            present.append(0.0 if gradient is None else 1.0)
            if gradient is None:
                gradient = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
            taken = _taken(gradient, elements)
            sizes.append(sum(map(len, taken)))
            row += taken
        flags = torch.tensor(present, dtype=dtype, device=row[0].device)
        total = axis.all_reduce(torch.cat([*row, flags]))
        *values, flags = torch.split(total, [*sizes, len(parts)])
        for (number, elements), value, is_there in zip(parts, values, (flags > 0).tolist(), strict=True):
            if is_there:
                found[number] = _with_elements(parameters[number], found[number], elements, value)
    return found


def _with_elements(parameter: nn.Parameter, gradient: Tensor | None, elements: _Elements, values: Tensor) -> Tensor:
    """The gradient with new values of some elements, in place where it is there."""
    if gradient is None:
        gradient = torch.zeros(parameter.shape, dtype=values.dtype, device=parameter.device)
    elif not gradient.is_contiguous():
        gradient = gradient.contiguous()
    flat = gradient.view(-1)
    if isinstance(elements, Tensor):
        flat[elements.to(flat.device)] = values
    else:
        runs = [slice(0, len(flat))] if elements is None else elements
        for run, piece in zip(runs, torch.split(values, [run.stop - run.start for run in runs]), strict=True):
            flat[run] = piece
    return gradient
