"""Which tokens of a sequence each context-parallel rank holds. No torch here.

    4 ranks, zig-zag   chunk  0 1 2 3 4 5 6 7        plain   chunk  0 1 2 3
                       rank   0 1 2 3 3 2 1 0                rank   0 1 2 3

With causal attention, later tokens attend to more keys. In plain order the last rank computes most. In zig-zag order
(Llama 3, arXiv:2407.21783, section 3.3.2) rank r holds the chunks r and 2n-1-r, and all ranks compute equally much.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from pipeloom.errors import InputError

OrderName = Literal["zig-zag", "plain"]


class Block(NamedTuple):
    """Queries and keys of two ranks, as ranges of their tokens, where queries attend to keys.

    Attributes:
        rows: of the queries.
        columns: of the keys.
        causal: whether row i attends to columns 0 to i alone; else, to all of them.
    """

    rows: slice
    columns: slice
    causal: bool


@dataclass(frozen=True, slots=True)
class Order:
    """The order of the tokens of a sequence of `length` tokens on `degree` ranks.

    Args:
        name: "zig-zag" or "plain".
        degree: number of ranks.
        length: tokens of a whole sequence, a multiple of `multiple`.
    """

    name: OrderName
    degree: int
    length: int

    @staticmethod
    def multiple(name: OrderName, degree: int) -> int:
        """What lengths must be a multiple of."""
        return 2 * degree if name == "zig-zag" and degree > 1 else degree

    @classmethod
    def of(cls, name: OrderName, degree: int, length: int, *, why: str) -> Order:
        """The order of sequences.

        Args:
            why: what asks for it, for the error.

        Raises:
            InputError: the length is no multiple of the number of chunks.
        """
        multiple = cls.multiple(name, degree)
        if length % multiple or length == 0:
            below, above = length // multiple * multiple, -(-max(length, 1) // multiple) * multiple
            fits = f"{below} or {above}" if below else str(above)
            raise InputError(
                f"sequences of {length} tokens for {why}: must be a multiple of {multiple}. Pad or cut them to {fits}."
            )
        return cls(name, degree, length)

    @property
    def num_held(self) -> int:
        """Tokens of a sequence per rank."""
        return self.length // self.degree

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return self.length // self.multiple(self.name, self.degree)

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order in which it holds them: ascending."""
        if self.multiple(self.name, self.degree) == self.degree:
            return (rank,)
        return rank, 2 * self.degree - 1 - rank

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """The positions of a rank's tokens, as ranges (start, end)."""
        return [(chunk * self.chunk, (chunk + 1) * self.chunk) for chunk in self.chunks(rank)]

    def blocks(self, rank: int, source: int, *, causal: bool) -> list[Block]:
        """Where queries of `rank` attend to keys of `source`."""
        whole = slice(0, self.num_held)
        if not causal:
            return [Block(whole, whole, False)]
        if rank == source:  # positions ascend, so it is the usual triangle
            return [Block(whole, whole, True)]
        # A key chunk is seen by the query chunks behind it: all of them from some row on.
        seen = []
        for column, key in enumerate(self.chunks(source)):
            first = next((row for row, query in enumerate(self.chunks(rank)) if query > key), None)
            if first is not None:
                seen.append((first * self.chunk, column))
        blocks: list[Block] = []
        for first, column in seen:
            start, end = column * self.chunk, (column + 1) * self.chunk
            if blocks and blocks[-1].rows.start == first and blocks[-1].columns.stop == start:
                start = blocks.pop().columns.start
            blocks.append(Block(slice(first, self.num_held), slice(start, end), False))
        return blocks

    def by_position(self) -> list[tuple[int, int]]:
        """For each chunk of the sequence: the rank that holds it, and its place among the chunks of the rank."""
        places = {c: (rank, place) for rank in range(self.degree) for place, c in enumerate(self.chunks(rank))}
        assert all(b == a + 1 for a, b in pairwise(sorted(places)))
        return [places[chunk] for chunk in sorted(places)]
