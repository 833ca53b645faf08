# ruff: noqa: N803  # shapes are part of the names
"""`Tokens`: the tokens of every sequence that this rank holds under context parallelism, and attention to all others.

    TeraPipe's slices       a rank runs one range of tokens after the other         `pipeloom.slicing.context`
    context parallelism     each rank holds a part of the tokens, all at once       `pipeloom.parallel.context`

The engine makes the tokens of a micro-batch current around its forward, and again around its backward, so that
recomputation sees the same tokens. Attention and positions read them with `current_tokens`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor

# A key of torch's thread-local storage. Unlike Python's, autograd propagates it to its threads for other devices, and
# so to recomputation there. It holds a `Slice` or `Tokens`.
_KEY = "pipeloom.part_of_sequence"


class Tokens(ABC):
    """The part of each sequence that this rank holds.

    Args:
        length: tokens of a whole sequence.
        num_held: tokens of it on this rank.
    """

    def __init__(self, length: int, num_held: int) -> None:
        self.length, self.num_held = length, num_held

    @abstractmethod
    def positions(self, device: torch.device | None = None) -> Tensor:
        """The positions of this rank's tokens in the whole sequence, ascending, int64 [num_held]."""

    def rows(self, table: Tensor) -> Tensor:
        """The rows of a table [length or more, ...] for this rank's tokens."""
        return table[self.positions(table.device)]

    @abstractmethod
    def attend(
        self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool, scale: float | None, window: int | None
    ) -> Tensor:
        """Attention of this rank's queries to the keys and values of all ranks, [B, H, S, D]; all ranks call it.

        Args:
            q_BHSD, k_BKSD, v_BKSD: of this rank's tokens.
            causal: whether a query attends to no later key.
            scale: factor of the scores; defaults to ``1 / sqrt(D)``.
            window: a query attends to no key `window` or more positions before it; None: no such limit.
        """

    @contextmanager
    def current(self) -> Iterator[Self]:
        """Make these the current tokens of this thread."""
        with running(self):
            yield self


def current_tokens() -> Tokens | None:
    """The tokens of the micro-batch that runs in this thread, or whose backward does; None without such a context."""
    part = current_part()
    return part if isinstance(part, Tokens) else None


def current_part() -> Any:
    """The `Slice` or the `Tokens` that run in this thread; None: whole sequences."""
    if torch.compiler.is_compiling():  # `make_sliceable` refuses compiled modules
        return None
    return torch._C._get_obj_in_tls(_KEY) if torch._C._is_key_in_tls(_KEY) else None


@contextmanager
def running(part: Any) -> Iterator[None]:
    """Make `part` the current part of sequences in this thread."""
    before = current_part()
    torch._C._stash_obj_in_tls(_KEY, part)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_KEY, before)
