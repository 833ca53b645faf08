"""`Grid`: the axes of a `GridShape` on a mesh, and what layers do along them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function, exchange, reduce_scatter
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.tensor.grids.cubic import product_3d
from pipeloom.parallel.tensor.grids.shape import Activations, GridShape
from pipeloom.parallel.tensor.grids.summa import product_2d


class Grid:
    """A process on a grid. Every process of the mesh makes it.

    Args:
        mesh: its axis tp is divided into the grid.
        shape: of the grid.

    Attributes:
        shape: as given.
        place: the coordinates of this process.
    """

    def __init__(self, mesh: Mesh, shape: GridShape) -> None:
        mesh.divide(**shape.axes)
        self.shape, self.place = shape, mesh.place
        self._axes = {name: mesh.axis(name) for name in shape.axes}
        joint = {shape.outer.batch, shape.inner.batch} - {(name,) for name in shape.axes}
        if shape.layout != "3d":
            joint.add(("tp_row", "tp_column"))
        self._joint = {names: mesh.axis(*names) for names in sorted(joint)}

    def axis(self, *names: str) -> Axis:
        """One axis, or those that cut the batch together."""
        return self._axes[names[0]] if len(names) == 1 else self._joint[names]

    def product(self, x: Tensor, weight: Tensor, source: Activations, target: Activations) -> Tensor:
        """``x @ weight.T``, from activations that lie as `source` to others that lie as `target`."""
        if self.shape.layout == "3d":
            return product_3d(x, weight, self.axis(target.width), self.axis("tp_i"), self.axis(source.width))
        return product_2d(x, weight, self.axis("tp_row"), self.axis("tp_column"))

    def embed(self, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows of a table that lies as the weight of a layer from `outer` to `inner`, such as a head's.

        Every process looks up its block of the features of the tokens in its block of the vocabulary. 2D: the process
        in row i and column j has features i, so what it finds goes to column i of the row of each sample, where the
        parts of all blocks of the vocabulary are summed. 3D: features are gathered along i, parts summed along j. The
        table does not travel, and the gradient of the table, in W of a split backward, needs no collective.

        Args:
            ids: [B, S] of the whole micro-batch.
            look_up: rows [.., W/input_blocks] of this process's block of the table for ids, 0 for ids of others.

        Returns:
            [B/batch_blocks, S, W/side].

        Raises:
            InputError: B is not a multiple of the number of blocks.
        """
        self.shape.check_divides(len(ids), self.shape.batch_blocks, "micro-batch size")
        if self.shape.layout == "3d":
            return reduce_scatter(exchange(look_up(ids), self.axis("tp_i"), 0, -1), self.axis("tp_j"), 0)
        if self.shape.layout == "2.5d":
            ids = ids.chunk(self.shape.depth)[self.place.coordinates["tp_depth"]]
        return apply_function(_SumTransposed, look_up(ids), self.axis("tp_row", "tp_column"), self.shape.side)

    def __deepcopy__(self, memo: object) -> "Grid":
        return self  # copies of a module communicate along the same axes


class _SumTransposed(Function):
    """Samples b of the processes of row i, summed, on the process in row b and column i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Axis, side: int) -> Tensor:
        ctx.grid, ctx.side = grid, side
        row, column = divmod(grid.index, side)
        pieces = [x.new_empty(0, *x.shape[1:])] * grid.degree
        for sample, piece in enumerate(x.chunk(side)):
            pieces[sample * side + row] = piece
        parts = grid.all_to_all(pieces)[column * side : (column + 1) * side]
        return torch.stack(parts).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        side, grid = ctx.side, ctx.grid
        row, column = divmod(grid.index, side)
        pieces = [gradient.new_empty(0, *gradient.shape[1:])] * grid.degree
        pieces[column * side : (column + 1) * side] = [gradient] * side
        return torch.cat(grid.all_to_all(pieces)[row::side]), None, None
