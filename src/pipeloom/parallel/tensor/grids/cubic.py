"""Products of matrices that lie in blocks on an l x l x l cube of processes, differentiable.

    3D tensor parallelism, arXiv:2105.14450. The process (i, j, k) holds

        X   tokens block i, of it block j; input features block k        [T/l^2, I/l]
        W   of the weight as `nn.Linear` keeps it: outputs block j; inputs block k, of it block i       [O/l, I/l^2]
        Y   tokens block i, of it block k; output features block j       [T/l^2, O/l]

    forward    X is gathered along j, W along i; the product, a part of Y for l times as many tokens, is summed and
               scattered along k
    backward   dY is gathered along k, W along i; dX is summed and scattered along j
               X is gathered along j; dW is summed and scattered along i

j is called the input axis, i the weight axis, k the output axis. Y lies as X does with j and k swapped, so the next
layer swaps its input and output axes, and after two layers activations lie as before.

Saved for the backward are the two blocks of the process alone: they are gathered again. All parts of one product are
1/l^3 of the full ones, for the time of the product 1/l^2.

Split backward: the gradient of the weight needs collectives too, so it is computed in I; see `summa`.

Legend: T tokens, I input features, O output features.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function


def product_3d(x: Tensor, weight: Tensor, inputs: Axis, weights: Axis, outputs: Axis) -> Tensor:
    """``x @ weight.T`` of matrices in blocks on a cube.

    Args:
        x: [B/l^2, ..., I/l]: block of dimension 0 by (`weights`, `inputs`), features by `outputs`.
        weight: [O/l, I/l^2]: outputs by `inputs`, inputs by (`outputs`, `weights`).
        inputs, weights, outputs: the three axes of the cube, of the same degree l; see the module.

    Returns:
        [B/l^2, ..., O/l]: block of dimension 0 by (`weights`, `outputs`), features by `inputs`.
    """
    if weights.degree == 1:
        return torch.nn.functional.linear(x, weight)
    found = apply_function(_Product, x.reshape(-1, x.shape[-1]), weight, inputs, weights, outputs)
    return found.view(*x.shape[:-1], found.shape[-1])


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, inputs: Axis, weights: Axis, outputs: Axis) -> Tensor:
        ctx.axes = inputs, weights, outputs
        ctx.save_for_backward(x, weight)
        part = inputs.all_gather(x, 0) @ weights.all_gather(weight, 1).t()
        return outputs.reduce_scatter(part, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        inputs, weights, outputs = ctx.axes
        of_x = of_weight = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            gradient = outputs.all_gather(gradient, 0)
        if ctx.needs_input_grad[0]:
            of_x = inputs.reduce_scatter(gradient @ weights.all_gather(weight, 1), 0)
        if ctx.needs_input_grad[1]:
            of_weight = weights.reduce_scatter(gradient.t() @ inputs.all_gather(x, 0), 1)
        return of_x, of_weight, None, None, None
