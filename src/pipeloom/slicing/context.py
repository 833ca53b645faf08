"""`SliceContext`: what the slices of one micro-batch share inside one stage.

    forward    slice 0 ──> slice 1 ──> ... ──> slice n-1      each leaves its keys and values for those after it
    backward   slice 0 <── slice 1 <── ... <── slice n-1      each leaves gradients for the keys and values before it

TeraPipe (arXiv:2102.07988). Whoever runs the slices activates one around its forward, and again around its backward, so
that recomputation under activation checkpointing finds itself in the same place. Modules ask with `current_slice`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, RunError
from pipeloom.slicing.sequence import GrowingSequence

# torch's own thread-local storage: unlike Python's, it is carried over to the threads in which autograd runs backwards
# of other devices, and so into recomputation there.
_KEY = "pipeloom.slice"


class Slice:
    """The slice that is running, as modules see it.

    Attributes:
        index: which of the micro-batch's slices.
        start, end: its tokens, `start` included.
        length: tokens of the whole sequence.
    """

    __slots__ = ("_calls", "_context", "_first_time", "cache", "end", "index", "length", "start")

    def __init__(
        self, context: SliceContext, index: int, start: int, end: int, length: int, *, first_time: bool
    ) -> None:
        self.index = index
        self.start = start
        self.end = end
        self.length = length
        self.cache: dict[Hashable, Tensor] = {}  # what modules compute once for a slice: masks
        self._context = context
        self._first_time = first_time
        self._calls: dict[Hashable, int] = {}

    def extend(self, owner: Hashable, new: Tensor, dim: int = -2) -> Tensor:
        """Put `new` behind what earlier slices left under `owner`.

        Args:
            owner: who keeps what: a module, or a pair of a module and a name. Once for each in a slice.
            new: this slice's part, ``end - start`` long in dimension `dim`.

        Returns:
            The sequence from 0 to `end`. Its backward keeps the gradient of what is earlier until those slices'
            backwards, and gives `new` all of its own, for which the later slices' backwards have to come before.

        Raises:
            InputError: `new` is not as long as the slice. RunError: backwards do not descend over the slices.
        """
        if new.shape[dim] != self.end - self.start:
            raise InputError(
                f"{_name(owner)} extends a sequence by {new.shape[dim]} tokens in a slice of {self.end - self.start}: "
                "a slice's tokens stay together; keep the sequence's length through the model"
            )
        if self.start == 0 and self.end == self.length:
            return new
        sequences = self._context.sequences
        key = self.call_key(owner)
        if key not in sequences:
            sequences[key] = GrowingSequence(new, dim % new.dim(), self.length)
        return sequences[key].extend(new, self.start, self.end)

    def seed(self, call_key: Hashable, block: int) -> int:
        """Of the random numbers of a block of a call: the same in every slice, and when it is recomputed."""
        slot = self._context.slots.setdefault(call_key, len(self._context.slots))
        return _hash(self._context.random_seed(), slot, block)

    def call_key(self, owner: Hashable) -> Hashable:
        """`owner`, and which of its calls in this slice this is.

        Raises:
            RunError: an owner that calls several times is recomputed: blocks are, in another order, so which call it
                is cannot be known.
        """
        number = self._calls.get(owner, 0)
        self._calls[owner] = number + 1
        most = self._context.most_calls
        if self._first_time:
            most[owner] = max(most.get(owner, 0), number + 1)
        elif most.get(owner, 0) != 1:
            raise RunError(
                f"{_name(owner)} runs {most.get(owner, 0)} times in a slice and is recomputed: its calls cannot be "
                "told apart; give each call a module of its own"
            )
        return owner, number


class SliceContext:
    """Keys, values, their gradients, and random streams of one stage and micro-batch.

    One from the forward of slice 0 to its backward, which comes last; without gradients, to the last forward.

    Args:
        seed: numbers that dropout's masks follow from, such as (step's seed, stage, micro-batch); by default one is
            drawn from torch's default generator when the first mask is needed.
    """

    def __init__(self, seed: Sequence[int] | None = None) -> None:
        self.sequences: dict[Hashable, GrowingSequence] = {}
        self.slots: dict[Hashable, int] = {}
        self.most_calls: dict[Hashable, int] = {}
        self._seed = seed
        self._begun: set[int] = set()

    @contextmanager
    def slice(self, index: int, start: int, end: int, length: int) -> Iterator[Slice]:
        """Make slice `index`, tokens `start` to `end` of `length`, the current one of this thread.

        The first time is its forward; every other is one of its backwards.
        """
        if not 0 <= start < end <= length:
            raise InputError(
                f"slice {index} from token {start} to {end} of {length}: a slice has at least one token and lies "
                "inside the sequence; cut it otherwise"
            )
        first_time = index not in self._begun
        piece = Slice(self, index, start, end, length, first_time=first_time)
        before = current_slice()
        torch._C._stash_obj_in_tls(_KEY, piece)
        try:
            yield piece
            self._begun.add(index)  # not if it failed: it may be tried again
        finally:
            torch._C._stash_obj_in_tls(_KEY, before)

    def random_seed(self) -> int:
        """What all of its random streams follow from."""
        if self._seed is None:
            self._seed = (int(torch.randint(2**63 - 1, ())),)
        return _hash(*self._seed)

    def close(self) -> None:
        """Let go of everything. What graphs still need lives as long as they do."""
        self.sequences.clear()

    def tensors(self) -> list[Tensor]:
        """Those that it holds and its slices share."""
        return [tensor for sequence in self.sequences.values() for tensor in sequence.tensors()]

    @property
    def num_bytes(self) -> int:
        """What it holds now."""
        return sum(sequence.num_bytes for sequence in self.sequences.values())


def current_slice() -> Slice | None:
    """The slice that this thread, or the backward that runs for it, is in; None where sequences are whole."""
    if torch.compiler.is_compiling():  # compiled modules are refused where there are slices
        return None
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


def _hash(*numbers: int) -> int:
    """A number below 2**63."""
    digest = blake2b("/".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _name(owner: Hashable) -> str:
    while isinstance(owner, tuple) and owner:
        owner = owner[0]
    return type(owner).__name__ if isinstance(owner, nn.Module) else str(owner)
