"""`GrowingSequence`: a tensor that slices extend in order, and its gradient.

    forward    [ slice 0 | slice 1 | slice 2 |  -  ]   each slice writes its part and reads everything up to its end
    backward   [   dK    |   dK    |   dK    | done ]   each slice adds to earlier parts and takes its own part

The operator of the paper (arXiv:2102.07988, section 3.3) passes the cache and its gradient between slices as inputs and
outputs of the graph. Here both are kept outside of the graph, so the backward of a slice starts at the outputs of its
stage as usual, and recomputation of a slice writes the same values to the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeloom.errors import RunError


class GrowingSequence:
    """A buffer for the full sequence.

    Args:
        like: the part of the first slice.
        dim: the sequence dimension, not negative.
        length: number of tokens of the full sequence.
    """

    def __init__(self, like: Tensor, dim: int, length: int) -> None:
        shape = [*like.shape[:dim], length, *like.shape[dim + 1 :]]
        self._dim = dim
        self._dtype = like.dtype
        self._values: Tensor | None = like.new_empty(shape)
        self._gradients: Tensor | None = None
        self._length = length
        self._done = length  # the first token whose backward has run

    def tensors(self) -> list[Tensor]:
        """The buffers that are allocated now."""
        return [tensor for tensor in (self._values, self._gradients) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """Size of the allocated buffers."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def extend(self, new: Tensor, start: int, end: int) -> Tensor:
        """Write `new` at `start` and return the sequence up to `end`."""
        if new.requires_grad and torch.is_grad_enabled():
            extended: Tensor = _Extend.apply(new, self, start, end)  # type: ignore[no-untyped-call]
            return extended
        return self.write(new.detach(), start, end)

    def write(self, new: Tensor, start: int, end: int) -> Tensor:
        """Like `extend`, without autograd."""
        if self._values is None:
            raise RunError(
                f"tokens {start} to {end} are computed after the backward of the first slice, which released the "
                "sequence. Run all forwards and recomputation before it."
            )
        self._values.narrow(self._dim, start, end - start).copy_(new)
        # `.data` has a separate version counter: later slices write in place, but behind the end of this view.
        return self._values.narrow(self._dim, 0, end).data

    def take_gradient(self, gradient: Tensor | None, start: int, end: int) -> Tensor | None:
        """Accumulate the part of `gradient` before `start`; return the full gradient of tokens `start` to `end`."""
        if end != self._done:
            raise RunError(
                f"backward of tokens {start} to {end} after that of tokens {self._done} to {self._length}: backwards "
                "must run once per slice, in descending order. Run the backwards of later slices first."
            )
        self._done = start
        own = self._gradients.narrow(self._dim, start, end - start) if self._gradients is not None else None
        if gradient is not None:
            part = gradient.narrow(self._dim, start, end - start)
            own = part if own is None else part + own
            self._keep(gradient, start)
        if own is not None:
            own = own.to(self._dtype)
        if start == 0:  # this was the last backward
            self._values = self._gradients = None
        return own

    def _keep(self, gradient: Tensor, end: int) -> None:
        if end == 0:
            return
        earlier = gradient.narrow(self._dim, 0, end)
        if self._gradients is None:  # 16-bit gradients are accumulated in float32
            self._gradients = earlier.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        else:
            self._gradients.narrow(self._dim, 0, end).add_(earlier)


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, new: Tensor, sequence: GrowingSequence, start: int, end: int) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sequence, ctx.place = sequence, (start, end)
        return sequence.write(new, start, end)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        own = ctx.sequence.take_gradient(gradient, *ctx.place)
        ctx.sequence = None  # the graph may outlive the backward
        return own, None, None, None
