"""Products of matrices that lie in blocks on a q x q grid of processes: SUMMA, differentiable.

    The products of Optimus, arXiv:2104.05343. The process in row i and column j holds

        X[i, j]   tokens block i, input features block j       [T/q, I/q]
        W[j, i]   of the weight as `nn.Linear` keeps it: outputs block j, inputs block i       [O/q, I/q]
        Y[i, j]   tokens block i, output features block j      [T/q, O/q]

    forward    Y[i, j] = sum over t of X[i, t] W[j, t]'     X[i, t] is broadcast along row i, W[j, t] along column j
    backward  dX[i, t] = sum over j of dY[i, j] W[j, t]     W[j, t] is broadcast along column j, summed along row i
              dW[j, t] = sum over i of dY[i, j]' X[i, t]    X[i, t] is broadcast along row i, summed along column j

Saved for the backward are the two blocks of the process alone: blocks of others are broadcast again. While a product is
computed, the blocks of the next one travel.

Split backward: the gradient of a weight needs broadcasts and sums between processes, not a local product alone. It is
computed in I, along with the gradient of the input, and kept until W adds it to ``.grad``: for each micro-batch between
its I and its W, I O / q^2 elements. In exchange W communicates with no layout: processes need not be in the same W at
the same time, so W fills bubbles wherever they are.

Tesseract (2.5D, arXiv:2105.14500) runs these products in each of d layers of the grid, on other tokens. The layers have
the same W, and dW is their sum. This sum is not taken here, once per micro-batch, but once per step: the parameter says
so (``Placed.sum_over``).

Legend: T tokens of all q rows, I input features, O output features.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function


def product_2d(x: Tensor, weight: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """``x @ weight.T`` of matrices in blocks on a square grid.

    Args:
        x: [..., I/q], tokens block of this row, input block of this column.
        weight: [O/q, I/q], output block of this column, input block of this row.
        rows: the axis along which the row of a process varies: it connects the processes of one column.
        columns: the axis along which the column varies: it connects the processes of one row. Of the same degree q.

    Returns:
        [..., O/q], tokens block of this row, output block of this column.
    """
    if rows.degree == 1:
        return torch.nn.functional.linear(x, weight)
    found = apply_function(_Product, x.reshape(-1, x.shape[-1]), weight, rows, columns)
    return found.view(*x.shape[:-1], found.shape[-1])


def broadcasts(*blocks: tuple[Tensor, Axis]) -> Iterator[list[Tensor]]:
    """The blocks of member 0 of each axis, then those of member 1, and so on. The next ones travel meanwhile.

    Args:
        blocks: this member's blocks, each with the axis along which it is broadcast. The axes have the same degree.
    """
    degree = blocks[0][1].degree
    waiting = [axis.start_broadcast(block, 0) for block, axis in blocks]
    for source in range(degree):
        arriving = waiting
        if source + 1 < degree:
            waiting = [axis.start_broadcast(block, source + 1) for block, axis in blocks]
        yield [wait() for wait in arriving]


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Axis, columns: Axis) -> Tensor:
        ctx.rows, ctx.columns = rows, columns
        ctx.save_for_backward(x, weight)
        y: Tensor | None = None
        for x_t, weight_t in broadcasts((x, columns), (weight, rows)):
            y = x_t @ weight_t.t() if y is None else y.addmm_(x_t, weight_t.t())
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            for t, (weight_t,) in enumerate(broadcasts((weight, ctx.rows))):
                found = ctx.columns.reduce(gradient @ weight_t, t)
                of_x = found if t == ctx.columns.index else of_x
        if ctx.needs_input_grad[1]:
            for t, (x_t,) in enumerate(broadcasts((x, ctx.columns))):
                found = ctx.rows.reduce(gradient.t() @ x_t, t)
                of_weight = found if t == ctx.rows.index else of_weight
        return of_x, of_weight, None, None
