"""Sequence parallelism of Megatron (arXiv:2205.05198, section 4.2.2): tokens that are gathered, and not kept whole.

Between cut layers every process has S / t tokens. A column layer gathers them (g), a row layer sums and scatters its
output (the conjugate of g). The gathered input of a column layer is needed twice: in its forward, and for the gradient
of its weight. Between these it is not kept; its own tokens are, and are gathered again.

    forward     gather ── product ── ...                     keeps S / t tokens
    B           ... ── gather again ── gradients of weight and input ── reduce-scatter of the latter
    I and W     I: as B; the gathered tokens then wait for W, where nothing communicates

A W without collectives may run at any time on any rank; one that gathers would make tensor-parallel ranks wait for each
other in it. What that costs is memory: between I and W a layer keeps S tokens in place of S / t.

In a block that is recomputed as a whole, the recomputation gathers, and its backward follows at once: there the tokens
stay gathered.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from pipeloom.autograd.recomputation import in_recomputed_block
from pipeloom.autograd.split_backward import Repeatable
from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_functions import reduce_from, reduce_scatter

TOKENS = 1  # the dimension of tokens in [batch, tokens, width]


def gather_tokens(x: Tensor, axis: Axis) -> Tensor:
    """All tokens [B, S, W] from this process's [B, S / t, W], for layers that compute a part each."""
    gathered: Tensor = _GatherTokens.apply(x, axis)  # type: ignore[no-untyped-call]
    return gathered


def scatter_sum(x: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
    """The sum of `x` over processes: all of it (g), or with `sequence` this process's tokens (the conjugate of g).

    Raises:
        InputError: the number of tokens is not a multiple of the number of processes.
    """
    if not sequence:
        return reduce_from(x, axis)
    check_tokens(x.shape[TOKENS], axis.degree)
    return reduce_scatter(x, axis, TOKENS)


def check_tokens(tokens: int, degree: int, *, context: int = 1) -> None:
    """Raises InputError where processes cannot share the tokens evenly; `context` ranks have shared them out before."""
    multiple = degree * context
    if tokens % multiple:
        low, high = tokens - tokens % multiple, tokens + multiple - tokens % multiple
        fix = f"{low} or {high}" if low else str(high)
        ranks = f"{degree} tensor-parallel ranks" if context == 1 else f"tp={degree} and cp={context}"
        raise InputError(
            f"a sequence or slice of {tokens} tokens with sequence parallelism on {ranks}: the number of tokens must "
            f"be a multiple of {multiple}. Use {fix} tokens, or sequence=False."
        )


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.gathered = axis, None
        ctx.save_for_backward(x)
        return axis.all_gather(x, TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.gathered = None  # products that came before have used it; what W needs, it holds
        return ctx.axis.reduce_scatter(gradient, TOKENS), None


class _GatheredAgain(Repeatable):
    """What a product saves in place of gathered tokens. Several products of the same tokens gather once."""

    __slots__ = ("_node", "_shape")
    late = True

    def __init__(self, node: Any, shape: torch.Size) -> None:
        self._node, self._shape = node, shape

    def tensor(self) -> Tensor:
        node = self._node
        if node.gathered is None:
            node.gathered = node.axis.all_gather(node.saved_tensors[0], TOKENS)
        return node.gathered.view(self._shape)  # type: ignore[no-any-return]


class _Kept(Repeatable):
    """What a product saves in place of its weight."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def tensor(self) -> Tensor:
        return self._tensor


class NotKept(saved_tensors_hooks):
    """Products inside the block do not keep `gathered`, a result of `gather_tokens`. Other tensors they keep."""

    def __init__(self, gathered: Tensor) -> None:
        storage, node = gathered.untyped_storage()._cdata, gathered.grad_fn
        size = gathered.numel()

        def pack(tensor: Tensor) -> Repeatable:
            if tensor.untyped_storage()._cdata == storage and tensor.numel() == size and tensor.is_contiguous():
                return _GatheredAgain(node, tensor.shape)
            return _Kept(tensor)

        super().__init__(pack, lambda saved: saved.tensor())


def is_gathered(x: Tensor) -> bool:
    """Whether `x` is a result of `gather_tokens` that products should not keep."""
    return type(x.grad_fn) is _NODE and torch.is_grad_enabled() and not in_recomputed_block()


_NODE: Any = _GatherTokens._backward_cls
