"""Layer norm and RMS norm of activations whose features are cut along an axis. Nothing is gathered.

Sums over features are all-reduced: forward the sum of x and, for a variance without cancellation, then that of
(x - mean)^2; backward the sums of dy * gain and dy * gain * normalized x, in one call. RMS norm has no mean. (Optimus,
arXiv:2104.05343, sums x and x^2 at once: the same bytes.) Gradients of gain and bias are those of this
process's tokens.

Both are custom Functions: a split backward computes them in I.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import apply_function


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, eps: float) -> Tensor:
    """``F.layer_norm`` over the last dimension.

    Args:
        x: [..., W/n], the features of this member of `axis`.
        weight, bias: [W/n], or None.
    """
    return apply_function(_Norm, x, weight, bias, axis, eps, True)


def rms_norm(x: Tensor, weight: Tensor | None, axis: Axis, eps: float | None) -> Tensor:
    """``F.rms_norm`` over the last dimension; see `layer_norm`. `eps` None: the smallest of the dtype, as in torch."""
    return apply_function(_Norm, x, weight, None, axis, torch.finfo(x.dtype).eps if eps is None else eps, False)


def _wide(x: Tensor) -> Tensor:
    """`x` with at least 32 bits per number."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class _Norm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axis: Axis, eps: float, centered: bool
    ) -> Tensor:
        wide, width = _wide(x), x.shape[-1] * axis.degree
        mean = axis.all_reduce(wide.sum(-1, keepdim=True)) / width if centered else None
        from_mean = wide if mean is None else wide - mean
        inverse = (axis.all_reduce(from_mean.square().sum(-1, keepdim=True)) / width + eps).rsqrt()
        ctx.axis, ctx.has_bias = axis, bias is not None
        ctx.save_for_backward(x, weight, mean, inverse)
        y = from_mean * inverse
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        wide = _wide(x)
        normalized = (wide if mean is None else wide - mean) * inverse
        gradient, leading = _wide(gradient), tuple(range(gradient.dim() - 1))
        of_y = gradient if weight is None else gradient * weight
        parts = [(of_y * normalized).sum(-1, keepdim=True)]
        if mean is not None:
            parts.append(of_y.sum(-1, keepdim=True))
        sums = ctx.axis.all_reduce(torch.cat(parts, -1)) / (x.shape[-1] * ctx.axis.degree)
        of_x = of_y - normalized * sums[..., :1]
        if mean is not None:
            of_x = of_x - sums[..., 1:]
        of_weight = None if weight is None else (gradient * normalized).sum(leading).to(weight.dtype)
        of_bias = gradient.sum(leading).to(x.dtype) if ctx.has_bias else None
        return (of_x * inverse).to(x.dtype), of_weight, of_bias, None, None, None
