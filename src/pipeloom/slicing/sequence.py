"""`GrowingSequence`: one tensor that slices extend one after another, and the gradient that comes back for it.

    forward    [ slice 0 | slice 1 | slice 2 |  -  ]   every slice writes its part and reads all up to its end
    backward   [   dK    |   dK    |   dK    | done ]   every slice adds to what is before it and takes its own part

The paper's operator (arXiv:2102.07988, section 3.3) hands the cache and its gradient from slice to slice as inputs and
outputs of the graph. Here both are kept beside the graph, so a slice's backward starts at the outputs of its stage as
any other does, and a slice that is computed again writes the same numbers into the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeloom.errors import RunError


class GrowingSequence:
    """A buffer for a whole sequence.

    Args:
        like: the first slice's part.
        dim: the dimension along the sequence, from 0.
        length: of the whole sequence.
    """

    def __init__(self, like: Tensor, dim: int, length: int) -> None:
        shape = [*like.shape[:dim], length, *like.shape[dim + 1 :]]
        self._dim = dim
        self._dtype = like.dtype
        self._values: Tensor | None = like.new_empty(shape)
        self._gradients: Tensor | None = None
        self._length = length
        self._done = length  # where the part begins whose backwards have run

    def tensors(self) -> list[Tensor]:
        """What is held now."""
        return [tensor for tensor in (self._values, self._gradients) if tensor is not None]

    @property
    def num_bytes(self) -> int:
        """Of what is held now."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def extend(self, new: Tensor, start: int, end: int) -> Tensor:
        """Write `new` at `start` and return the sequence up to `end`."""
        if new.requires_grad and torch.is_grad_enabled():
            extended: Tensor = _Extend.apply(new, self, start, end)  # type: ignore[no-untyped-call]
            return extended
        return self.write(new.detach(), start, end)

    def write(self, new: Tensor, start: int, end: int) -> Tensor:
        """As `extend`, outside of the graph."""
        if self._values is None:
            raise RunError(
                f"tokens {start} to {end} come after the backward of the first slice, which let go of the sequence: "
                "run a slice's forwards and recomputation before that"
            )
        self._values.narrow(self._dim, start, end - start).copy_(new)
        # `.data` has a version of its own: what later slices write in place is behind the end of what is saved here.
        return self._values.narrow(self._dim, 0, end).data

    def take_gradient(self, gradient: Tensor | None, start: int, end: int) -> Tensor | None:
        """Keep the `gradient` of what is before `start`; return the whole gradient of `start` to `end`."""
        if end != self._done:
            raise RunError(
                f"backward of tokens {start} to {end} of a sequence where {self._done} to {self._length} is done: "
                "backwards descend over slices, each once; run the later slices' backwards first"
            )
        self._done = start
        own = self._gradients.narrow(self._dim, start, end - start) if self._gradients is not None else None
        if gradient is not None:
            part = gradient.narrow(self._dim, start, end - start)
            own = part if own is None else part + own
            self._keep(gradient, start)
        if own is not None:
            own = own.to(self._dtype)
        if start == 0:  # nobody needs the sequence any more
            self._values = self._gradients = None
        return own

    def _keep(self, gradient: Tensor, end: int) -> None:
        if end == 0:
            return
        earlier = gradient.narrow(self._dim, 0, end)
        if self._gradients is None:  # 16-bit gradients are summed up in 32
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
