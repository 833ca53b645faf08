# ruff: noqa: N803  # shapes are part of the names
"""`grouped_linear`: one linear layer per group of rows, each group with a matrix of its own.

    rows of x    [ expert 0 | expert 1 | - | expert 3 ]      counts = 3, 2, 0, 4
    result       [ x @ w0.T | x @ w1.T | - | x @ w3.T ]

The weight gradient is a product that a split backward defers to W (`pipeloom.autograd.weight_products`). Results and
gradients are those of ``F.linear`` on each group: bitwise, if rows are multiples of 16 bytes and ``.grad`` is None.

On the CPU, gradients of further micro-batches are added to ``.grad`` by the products themselves, as Megatron's
``gradient_accumulation_fusion`` does on GPUs: experts have several times as many parameters as a dense layer of equal
arithmetic, so writing each gradient once and reading it back to add it takes several percent of a step.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ALIGNED = 16  # bytes of which torch._grouped_mm wants rows to be a multiple
_ON_CPU = (torch.float32, torch.bfloat16, torch.float16)

Gradients = tuple[Tensor | None, Tensor | None, None, None]


def grouped_linear(x_AW: Tensor, weight_EFW: Tensor, counts_E: Tensor, *, transposed: bool = False) -> Tensor:
    """Multiply the rows of each group by the group's matrix.

    Args:
        x_AW: [A, W], rows sorted by group.
        weight_EFW: [E, F, W]; with `transposed`, [E, W, F].
        counts_E: [E] int64, rows per group; their sum is A. Where ``torch._grouped_mm`` runs on a GPU, the host does
            not read them, so it does not wait.
        transposed: whether `weight_EFW` multiplies from the right as it is.

    Returns:
        [A, F], of the dtype of autocast, or else of `x_AW`. The gradient of a matrix without rows is 0.
    """
    device = x_AW.device.type
    if torch.is_autocast_enabled(device) and x_AW.is_floating_point() and x_AW.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x_AW, weight_EFW = x_AW.to(dtype), weight_EFW.to(dtype)
    result: Tensor = GroupedLinear.apply(x_AW, weight_EFW, counts_E, transposed)  # type: ignore[no-untyped-call]
    return result


class GroupedLinear(torch.autograd.Function):
    """See `grouped_linear`. The node has `weights_later`: whether W computes the weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight, counts)
        ctx.transposed, ctx.weights_later = transposed, False
        return _rows(x, weight if transposed else weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Gradients:
        ctx.creates_graph = torch.is_grad_enabled()
        gradients: Gradients = _backward(ctx, gradient)
        return gradients


@once_differentiable
def _backward(ctx: Any, gradient: Tensor) -> Gradients:
    x, weight, counts = ctx.saved_tensors
    of_x = of_weight = None
    if ctx.needs_input_grad[0]:
        of_x = _rows(gradient, weight.transpose(1, 2) if ctx.transposed else weight, counts)
    if ctx.needs_input_grad[1] and not ctx.weights_later:
        # With a graph, torch tells who differentiates the gradient that it cannot.
        leaf = None if ctx.creates_graph else _accumulated_leaf(ctx.next_functions[1][0])
        of_weight = _weights(x, gradient, counts, transposed=ctx.transposed, leaf=leaf)
    return of_x, of_weight, None, None


def weight_formula(node: Any, operands: tuple[int, ...]) -> Callable[[Tensor], list[Tensor | None]]:
    """What W computes of a node, for `pipeloom.autograd.weight_products`."""
    x, _, counts = node.saved_tensors
    transposed, holder = node.transposed, node.next_functions[1][0]
    leaf = getattr(holder, "variable", None)
    return lambda gradient: [_weights(x, gradient, counts, transposed=transposed, leaf=leaf) for _ in operands]


def _accumulated_leaf(node: Any) -> Tensor | None:
    """The parameter to whose ``.grad`` the running backward adds what it passes to `node`; None if there is none."""
    leaf: Tensor | None = getattr(node, "variable", None)
    if leaf is None or torch.compiler.is_compiling():
        return None
    try:
        return leaf if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:  # torch.autograd.grad, which returns gradients
        return None


def _adds_in_place(leaf: Tensor, gradient: Tensor) -> bool:
    """Whether the products can add to the leaf's ``.grad``: no hook and no other thread needs the gradient itself.

    Autograd locks a leaf while it adds to it. Without that lock only one thread may do so.
    """
    held = leaf.grad
    return (
        held is not None
        and type(held) is Tensor
        and held.layout == torch.strided
        and held.device.type == "cpu"
        and held.dtype == gradient.dtype
        and held.shape == leaf.shape
        and held.is_contiguous()
        and leaf.requires_grad
        and not leaf._backward_hooks
        and not getattr(leaf, "_post_accumulate_grad_hooks", None)
        and threading.current_thread() is threading.main_thread()
    )


def _grouped_mm_runs(x: Tensor, *others: Tensor) -> bool:
    """Whether torch's own loop runs for these factors, which saves calls from Python, or on a GPU its kernel."""
    if x.device.type == "cuda":
        runs = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (8, 0)
    else:
        runs = x.device.type == "cpu" and x.dtype in _ON_CPU
    return runs and all(
        all(size * factor.element_size() % _ALIGNED == 0 for size in factor.shape[1:])
        and factor.data_ptr() % _ALIGNED == 0
        for factor in (x, *others)
    )


def _parts(sizes: list[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The groups of rows of each tensor."""
    return (torch.split(tensor, sizes) for tensor in tensors)


@torch.no_grad()
def _rows(x: Tensor, weight_EKM: Tensor, counts: Tensor) -> Tensor:
    """[A, K] rows times [E, K, M] matrices."""
    x = x.contiguous()
    if _grouped_mm_runs(x, weight_EKM):
        return torch._grouped_mm(x, weight_EKM, offs=counts.cumsum(0, dtype=torch.int32))
    result = x.new_empty(x.shape[0], weight_EKM.shape[2])
    sizes = counts.tolist()
    for size, rows, out, matrix in zip(sizes, *_parts(sizes, x, result), weight_EKM.unbind(), strict=True):
        if size:
            torch.mm(rows, matrix, out=out)
    return result


@torch.no_grad()
def _weights(
    x: Tensor, gradient: Tensor, counts: Tensor, *, transposed: bool, leaf: Tensor | None = None
) -> Tensor | None:
    """Gradient of the matrices; None if it was added to the ``.grad`` of `leaf`."""
    left, right = (x, gradient) if transposed else (gradient, x)
    left, right = left.contiguous(), right.contiguous()
    if leaf is not None and leaf.grad is not None and _adds_in_place(leaf, gradient):
        sizes = counts.tolist()
        for size, a, b, out in zip(sizes, *_parts(sizes, left, right), leaf.grad.unbind(), strict=True):
            if size:
                out.addmm_(a.t(), b)
        return None
    if _grouped_mm_runs(left, right):
        return torch._grouped_mm(left.t(), right, offs=counts.cumsum(0, dtype=torch.int32))
    result = x.new_empty(counts.shape[0], left.shape[1], right.shape[1])
    sizes = counts.tolist()
    for size, a, b, out in zip(sizes, *_parts(sizes, left, right), result.unbind(), strict=True):
        if size:
            torch.mm(a.t(), b, out=out)
        else:
            out.zero_()
    return result
