# ruff: noqa: N803  # shapes are part of the names
"""`fp8_linear`: a linear layer whose three products have factors of 8 bits (arXiv:2209.05433).

    y  = x8 @ w8.T      x, w in E4M3: 4 bits of exponent, 3 of mantissa
    dx = g8 @ w8        the gradient g of y in E5M2, which has more range
    dw = g8.T @ x8

Every factor is scaled by one number, so that its largest element is the largest of the format; sums are kept in 32
bits, and results have the dtype of `x`. The backward keeps the factors in 8 bits. The weight gradient is a product that
a split backward defers to W (`pipeloom.autograd.weight_products`).
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MULTIPLE = 16  # torch._scaled_mm wants sizes to be multiples of it
_LEAST = 1e-12  # of the largest element of a factor: zeros stay zeros


def use_fp8(module: nn.Module) -> list[str]:
    """Let the linear layers of a module multiply in 8 bits from now on; their parameters stay as they are.

    Pass blocks rather than a whole model: its head is a linear layer too, and loses most by 8 bits. It takes a GPU of
    compute capability 8.9 or more to be fast; elsewhere it shows what training does.

    Returns:
        The names of these layers: those of class nn.Linear whose two sizes are multiples of 16.
    """
    found = []
    for name, linear in module.named_modules():
        if type(linear) is nn.Linear and not (linear.in_features % _MULTIPLE or linear.out_features % _MULTIPLE):
            linear.forward = MethodType(_forward, linear)  # type: ignore[method-assign]
            found.append(name)
    return found


def _forward(linear: nn.Linear, x: Tensor) -> Tensor:
    return fp8_linear(x, linear.weight, linear.bias)


def fp8_linear(x: Tensor, weight_FW: Tensor, bias_F: Tensor | None = None) -> Tensor:
    """``F.linear`` with factors of 8 bits; where `x` has not a multiple of 16 rows, ``F.linear`` itself.

    Args:
        x: [..., W].
        weight_FW: [F, W]; F and W are multiples of 16.
        bias_F: [F].

    Returns:
        [..., F], of the dtype of autocast, or else of `x`.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weight_FW = x.to(dtype), weight_FW.to(dtype)
        bias_F = None if bias_F is None else bias_F.to(dtype)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] % _MULTIPLE or rows.shape[0] == 0:
        return F.linear(x, weight_FW, bias_F)
    result: Tensor = Fp8Linear.apply(rows, weight_FW)  # type: ignore[no-untyped-call]
    result = result.view(*x.shape[:-1], -1)
    return result if bias_F is None else result + bias_F


class Fp8Linear(torch.autograd.Function):
    """See `fp8_linear`. The node has `weights_later`: whether W computes the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = _in_8_bits(x, _E4M3)
        weight8, weight_scale = _in_8_bits(weight, _E4M3)
        ctx.save_for_backward(x8, x_scale, weight8, weight_scale)
        ctx.weights_later = False
        return _product(x8, weight8.t(), x_scale, weight_scale, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, x_scale, weight8, weight_scale = ctx.saved_tensors
        gradient8, scale = _in_8_bits(gradient, _E5M2)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _product(gradient8, _by_columns(weight8), scale, weight_scale, gradient.dtype)
        if ctx.needs_input_grad[1] and not ctx.weights_later:
            of_weight = _of_weight(gradient8, scale, x8, x_scale, gradient.dtype)
        return of_x, of_weight


def weight_formula(node: Any, operands: tuple[int, ...]) -> Callable[[Tensor], list[Tensor]]:
    """What W computes of a node, for `pipeloom.autograd.weight_products`."""
    x8, x_scale, _, _ = node.saved_tensors

    def formula(gradient: Tensor) -> list[Tensor]:
        gradient8, scale = _in_8_bits(gradient, _E5M2)
        return [_of_weight(gradient8, scale, x8, x_scale, gradient.dtype) for _ in operands]

    return formula


def _in_8_bits(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The tensor in a format of 8 bits, and the float32 number that it was divided by."""
    largest = torch.finfo(dtype).max
    scale = tensor.abs().amax().float().clamp(min=_LEAST) / largest
    return (tensor.float() / scale).clamp(-largest, largest).to(dtype), scale


def _by_columns(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """[A, K] by rows times [K, B] by columns."""
    if dtype is torch.float64:
        return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=torch.float32).double()
    return torch._scaled_mm(left, right, left_scale, right_scale, out_dtype=dtype)


def _of_weight(gradient8: Tensor, scale: Tensor, x8: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    return _product(gradient8.t().contiguous(), _by_columns(x8), scale, x_scale, dtype)
