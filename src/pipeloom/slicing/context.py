"""`SliceContext`: the state that the slices of one micro-batch share within one stage.

    forward    slice 0 ──> slice 1 ──> ... ──> slice n-1      passes keys and values to later slices
    backward   slice 0 <── slice 1 <── ... <── slice n-1      passes gradients of keys and values to earlier slices

TeraPipe (arXiv:2102.07988). The engine enters a slice around its forward and again around its backward, so that
activation recomputation sees the same slice. Modules read it with `current_slice`.

The operator of the paper (section 3.3) passes the cache and its gradient between slices as inputs and outputs of the
graph. Here both are kept outside of the graph (`GrowingSequence`), so the backward of a slice starts at the outputs of
its stage as usual, and recomputation of a slice writes the same values to the same place.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeloom.errors import InputError, RunError
from pipeloom.slicing.tokens import Tokens, current_part, running


class GrowingSequence:
    """A tensor that slices extend in order, and its gradient: a buffer for the full sequence.

        forward    [ slice 0 | slice 1 | slice 2 |  -  ]   each slice writes its part and reads everything up to its end
        backward   [   dK    |   dK    |   dK    | done ]  each slice adds to earlier parts and takes its own part

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
            earlier = gradient.narrow(self._dim, 0, start)
            if self._gradients is not None:
                self._gradients.narrow(self._dim, 0, start).add_(earlier)
            elif start > 0:  # 16-bit gradients are accumulated in float32
                self._gradients = earlier.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        if own is not None:
            own = own.to(self._dtype)
        if start == 0:  # this was the last backward
            self._values = self._gradients = None
        return own


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


class Slice:
    """The slice that is running.

    Attributes:
        index: its position among the slices of the micro-batch.
        start, end: its range of tokens; `end` is exclusive.
        length: number of tokens of the full sequence.
        cache: tensors that modules compute once per slice, such as masks.
    """

    __slots__ = ("_calls", "_context", "_first_time", "cache", "end", "index", "length", "start")

    def __init__(
        self, context: "SliceContext", index: int, start: int, end: int, length: int, *, first_time: bool
    ) -> None:
        self.index, self.start, self.end, self.length = index, start, end, length
        self.cache: dict[Hashable, Tensor] = {}
        self._context, self._first_time = context, first_time
        self._calls: dict[Hashable, int] = {}

    def extend(self, owner: Hashable, new: Tensor, dim: int = -2) -> Tensor:
        """Append `new` to the tensor that earlier slices extended under `owner`.

        Args:
            owner: the key of the tensor: a module, or a pair of a module and a name.
            new: the part of this slice, of size ``end - start`` in dimension `dim`.
            dim: the sequence dimension.

        Returns:
            The tensor from token 0 to `end`. Its backward accumulates the gradient of earlier tokens until the backward
            of their slice, and returns the full gradient of `new`; this requires that later slices run their backward
            first.

        Raises:
            InputError: `new` has another length than the slice.
            RunError: backwards do not run in descending order of slices.
        """
        if new.shape[dim] != self.end - self.start:
            raise InputError(
                f"{_name(owner)} extends a sequence by {new.shape[dim]} tokens in a slice of {self.end - self.start}: "
                "the numbers must be equal. Keep the sequence length constant through the model."
            )
        if self.start == 0 and self.end == self.length:
            return new
        sequences = self._context.sequences
        key = self.call_key(owner)
        if key not in sequences:
            sequences[key] = GrowingSequence(new, dim % new.dim(), self.length)
        return sequences[key].extend(new, self.start, self.end)

    def shared(self) -> list[Tensor]:
        """The tensors that all slices of the micro-batch share: keys, values and their gradients."""
        return self._context.tensors()

    def seed(self, call_key: Hashable, block: int) -> int:
        """The random seed of a block of tokens of one call; the same in every slice and in recomputation."""
        context = self._context
        slot = context.slots.setdefault(call_key, len(context.slots))
        return hashed(context.random_seed(), slot, block)

    def call_key(self, owner: Hashable) -> Hashable:
        """`owner`, and the number of its calls in this slice so far.

        Raises:
            RunError: an owner with several calls per slice is recomputed. Recomputation runs blocks in another order,
                so its calls cannot be matched.
        """
        number = self._calls.get(owner, 0)
        self._calls[owner] = number + 1
        most = self._context.most_calls
        if self._first_time:
            most[owner] = max(most.get(owner, 0), number + 1)
        elif most.get(owner, 0) != 1:
            raise RunError(
                f"{_name(owner)} runs {most.get(owner, 0)} times per slice, which does not work with activation "
                "recomputation. Use a separate module for each call."
            )
        return owner, number


class SliceContext:
    """Keys, values, their gradients, and random streams of one stage and micro-batch.

    A context lasts from the forward of slice 0 to its backward, which is the last; without gradients, to the last
    forward.

    Args:
        seed: numbers that seed the dropout masks, such as (seed of the step, stage, micro-batch). By default, a seed is
            drawn from torch's default generator for the first mask.
    """

    def __init__(self, seed: Sequence[int] | None = None) -> None:
        self.sequences: dict[Hashable, GrowingSequence] = {}
        self.slots: dict[Hashable, int] = {}
        self.most_calls: dict[Hashable, int] = {}
        self.seed = seed
        self._begun: set[int] = set()

    @contextmanager
    def slice(self, index: int, start: int, end: int, length: int) -> Iterator[Slice]:
        """Make slice `index`, tokens `start` to `end` of `length`, the current slice of this thread.

        The first time is its forward; later times are its backward.

        Raises:
            InputError: the slice is empty or not inside the sequence.
        """
        if not 0 <= start < end <= length:
            raise InputError(
                f"slice {index} from token {start} to {end} of {length}: must have at least one token and be inside "
                "the sequence."
            )
        piece = Slice(self, index, start, end, length, first_time=index not in self._begun)
        with running(piece):
            yield piece
        self._begun.add(index)  # only after success: a failed forward may be repeated

    def random_seed(self) -> int:
        """The seed of all random streams of this context."""
        if self.seed is None:
            self.seed = (int(torch.randint(2**63 - 1, ())),)
        return hashed(*self.seed)

    def close(self) -> None:
        """Release all tensors, except those that autograd graphs still reference."""
        self.sequences.clear()

    def tensors(self) -> list[Tensor]:
        """All tensors that the slices share."""
        return [tensor for sequence in self.sequences.values() for tensor in sequence.tensors()]

    @property
    def num_bytes(self) -> int:
        """Size of `tensors`."""
        return sum(tensor.nbytes for tensor in self.tensors())


def current_slice() -> Slice | None:
    """The slice that runs in this thread, or whose backward does; None outside of slices.

    Raises:
        InputError: under context parallelism, where the tokens of a rank are no slice.
    """
    part = current_part()
    if isinstance(part, Tokens):
        raise InputError(
            "a module calls current_slice() under context parallelism, where the tokens of a rank are no slice. Use "
            "token_positions(), position_rows() and attention() of pipeloom.slicing, which know both."
        )
    return part if isinstance(part, Slice) else None


def hashed(*parts: int | str) -> int:
    """A seed below 2**63."""
    digest = blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _name(owner: Hashable) -> str:
    while isinstance(owner, tuple) and owner:
        owner = owner[0]
    return type(owner).__name__ if isinstance(owner, nn.Module) else str(owner)
