"""Steps of sends, and what ranks hold before and after a collective.

A tensor of n bytes is divided into chunks. In a step every rank sends at most one message, and receives at most one;
all messages of a step start from what ranks held before it. With p ranks and root 0:

                    held before                     held behind
    broadcast       rank 0: all chunks              all chunks everywhere
    reduce          all chunks everywhere           rank 0: the sums of all chunks
    all-reduce      all chunks everywhere           the sums everywhere
    gather          rank r: chunk r                 rank 0: all chunks
    all-gather      rank r: chunk r                 all chunks everywhere
    scatter         rank 0: all chunks              rank r: chunk r
    reduce-scatter  all chunks everywhere           rank r: the sum of chunk r
    all-to-all      rank r: chunks r p ... r p + p - 1    rank r: chunks r, p + r, 2 p + r, ...

A chunk of an all-to-all is numbered source x p + destination, and n bytes are those that one rank holds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

COLLECTIVES = (
    "broadcast",
    "reduce",
    "all-reduce",
    "gather",
    "all-gather",
    "scatter",
    "reduce-scatter",
    "all-to-all",
)
SUMMED = ("reduce", "all-reduce", "reduce-scatter")


class Send(NamedTuple):
    """One message.

    Attributes:
        source, target: ranks.
        chunks: that it has.
        adds: whether the target adds them to its own; else they are new to it.
    """

    source: int
    target: int
    chunks: tuple[int, ...]
    adds: bool = False


Step = tuple[Send, ...]


def transposed(steps: Sequence[Step], *, adds: bool) -> tuple[Step, ...]:
    """The collective with all messages in the opposite direction, from the last step to the first.

    A broadcast becomes a reduce, an all-gather a reduce-scatter, and a gather, without sums, a scatter.
    """
    return tuple(tuple(Send(send.target, send.source, send.chunks, adds) for send in step) for step in reversed(steps))


def held_before(collective: str, ranks: int, chunks: int) -> list[list[int]]:
    """The chunks of each rank before a collective."""
    full = list(range(chunks))
    match collective:
        case "broadcast" | "scatter":
            return [full if rank == 0 else [] for rank in range(ranks)]
        case "gather" | "all-gather":
            return [[rank] for rank in range(ranks)]
        case "all-to-all":
            return [full[rank * ranks : (rank + 1) * ranks] for rank in range(ranks)]
        case _:
            return [full for _ in range(ranks)]


def held_behind(collective: str, ranks: int, chunks: int) -> list[list[int]]:
    """The chunks of each rank that a collective promises."""
    full = list(range(chunks))
    match collective:
        case "reduce" | "gather":
            return [full if rank == 0 else [] for rank in range(ranks)]
        case "scatter" | "reduce-scatter":
            return [[rank] for rank in range(ranks)]
        case "all-to-all":
            return [full[rank::ranks] for rank in range(ranks)]
        case _:
            return [full for _ in range(ranks)]


def replay(steps: Iterable[Step], held: Sequence[Mapping[int, int]]) -> Iterator[list[dict[int, int]]]:
    """What every rank holds before the first step and behind each of them: the value of each of its chunks.

    Args:
        steps: of a collective.
        held: value by chunk, for each rank.
    """
    now = [dict(chunks) for chunks in held]
    yield [dict(chunks) for chunks in now]
    for step in steps:
        messages = [(send, [now[send.source][chunk] for chunk in send.chunks]) for send in step]
        for send, values in messages:
            mine = now[send.target]
            for chunk, value in zip(send.chunks, values, strict=True):
                mine[chunk] = mine[chunk] + value if send.adds else value
        yield [dict(chunks) for chunks in now]
