"""Differentiable collectives along an `Axis`, each with its conjugate as backward.

    function            forward                 backward
    copy_to             identity                all-reduce          f of Megatron (arXiv:1909.08053, section 3)
    reduce_from         all-reduce              identity            g of Megatron
    gather              all-gather              own piece           the result is used in the same way by all members
    gather_partial      all-gather              reduce-scatter      each member uses the result in its own way
    scatter             own piece               all-gather          of a value that all members have
    reduce_scatter      reduce-scatter          all-gather
    exchange            all-to-all              all-to-all back
    share_gradient      identity                1/n of it               before a sum over members that all have it

In `gather_partial` and `copy_to` gradients of members are parts of the gradient, which are summed; in `gather` and
`reduce_from` every member has the whole gradient already. With an axis of one member all are the identity.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from pipeloom.parallel.axis import Axis


def copy_to(x: Tensor, axis: Axis) -> Tensor:
    """`x`, which all members have; its gradients are summed over members."""
    return x if axis.degree == 1 else apply_function(_CopyTo, x, axis)


def reduce_from(x: Tensor, axis: Axis) -> Tensor:
    """The sum of `x` over members; its gradient, equal on all members, passes as it is."""
    return x if axis.degree == 1 else apply_function(_ReduceFrom, x, axis)


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All members' `x` along `dim`, where what follows is the same on all members."""
    return x if axis.degree == 1 else apply_function(_Gather, x, axis, dim, False)


def gather_partial(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """All members' `x` along `dim`, where each member computes a part of what follows."""
    return x if axis.degree == 1 else apply_function(_Gather, x, axis, dim, True)


def scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This member's piece along `dim` of `x`, which all members have. The size of `dim` is a multiple of the degree."""
    return x if axis.degree == 1 else apply_function(_Scatter, x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """This member's piece along `dim` of the sum over members."""
    return x if axis.degree == 1 else apply_function(_ReduceScatter, x, axis, dim)


def exchange(x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
    """Cut `x` along `split_dim`, send piece i to member i, and join what arrives along `join_dim`."""
    return x if axis.degree == 1 else apply_function(_Exchange, x, axis, split_dim, join_dim)


def share_gradient(x: Tensor, axis: Axis) -> Tensor:
    """`x`; its gradient, equal on all members, is divided by their number, so that a sum over them counts it once."""
    return x if axis.degree == 1 else apply_function(_ShareGradient, x, axis)


def apply_function(function: Any, *arguments: Any) -> Tensor:
    """``function.apply``, which torch does not type."""
    found: Tensor = function.apply(*arguments)
    return found


def _own(x: Tensor, axis: Axis, dim: int) -> Tensor:
    return x.chunk(axis.degree, dim)[axis.index].contiguous()


class _CopyTo(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_reduce(gradient), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return axis.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, partial: bool) -> Tensor:
        ctx.axis, ctx.dim, ctx.partial = axis, dim, partial
        return axis.all_gather(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial:
            return ctx.axis.reduce_scatter(gradient, ctx.dim), None, None, None
        return _own(gradient, ctx.axis, ctx.dim), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _own(x, axis, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(gradient, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return axis.reduce_scatter(x, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.all_gather(gradient, ctx.dim), None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, split_dim: int, join_dim: int) -> Tensor:
        ctx.axis, ctx.dims = axis, (split_dim, join_dim)
        return torch.cat(axis.all_to_all(x.chunk(axis.degree, split_dim)), join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        split_dim, join_dim = ctx.dims
        found = ctx.axis.all_to_all(gradient.chunk(ctx.axis.degree, join_dim))
        return torch.cat(found, split_dim), None, None, None


class _ShareGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.degree = axis.degree
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.degree, None
