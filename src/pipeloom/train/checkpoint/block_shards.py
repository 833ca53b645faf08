"""`BlockShard`: where the elements of a block, or of a data-parallel shard of a block, are in the full parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.parallel.placed import PlacedBlock
from pipeloom.train.checkpoint.boxes import Box, boxes_of


class _Rectangle(NamedTuple):
    """A rectangle of the full parameter and of the block.

    Attributes:
        full: its elements in the full parameter.
        run: neighbouring elements of the flattened block, all of one box of it.
        box: the elements of `run`, as a box of the block.
        inside: the elements of the rectangle in that box.
        owned: whether this rank owns the block's rectangle.
    """

    full: Box
    run: slice
    box: Box
    inside: tuple[slice, ...]
    owned: bool


class BlockShard:
    """Elements of a block.

    Args:
        block: of this rank.
        span: the elements of the flattened block that the tensors of this rank hold; None: all.

    Attributes:
        shape: of the full parameter.
        local_shape: of tensors of this rank, with padding.
        num_elements: of tensors of this rank.
    """

    def __init__(self, block: PlacedBlock, span: Range | None = None) -> None:
        how, place = block
        local = how.local_shape(place)
        start, stop = (0, math.prod(local)) if span is None else span[:2]
        self.shape, self.num_elements = how.shape, stop - start
        self.local_shape = local if span is None else (self.num_elements,)
        self._rectangles: list[_Rectangle] = []
        position = 0
        for box in boxes_of(Range(start, stop, local)):
            run = slice(position, position + box.num_elements)
            position = run.stop
            for there, here, owned in how.pieces(place):
                common = Box.of(here, local).within(box)
                if common is not None:
                    moved = [(t.start - h.start) for t, h in zip(there, here, strict=True)]
                    full = Box(
                        tuple(map(sum, zip(common.starts, moved, strict=True))),
                        tuple(map(sum, zip(common.stops, moved, strict=True))),
                        how.shape,
                    )
                    self._rectangles.append(_Rectangle(full, run, box, common.slices_in(box), owned))

    def boxes(self, *, owned_only: bool) -> list[Box]:
        """The rectangles of the full parameter with these elements; only those of blocks that this rank owns."""
        return [each.full for each in self._rectangles if each.owned or not owned_only]

    def views(self, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Every rectangle, and its elements in a tensor of `num_elements` elements, which is contiguous."""
        flat = tensor.reshape(-1)
        for each in self._rectangles:
            yield each.full, flat[each.run].view(each.box.extents)[each.inside]

    def view(self, tensor: Tensor, box: Box) -> Tensor:
        """The elements of one of `boxes` in a tensor of `num_elements` elements."""
        return next(found for full, found in self.views(tensor) if full == box)
