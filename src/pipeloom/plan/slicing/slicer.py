"""Cuts of sequences into slices and of a batch into pieces: the best (TeraPipe, arXiv:2102.07988), and even ones."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import InputError
from pipeloom.plan.slicing.slice_costs import Array, SliceCosts, SliceTime, ask
from pipeloom.plan.slicing.slice_search import Tables, measure, minimise

_MOST_CELLS = 2048  # a table has the square of them
_TOLERANCE = 1e-3  # without an epsilon
_MOST_ENTRIES = 2**25  # of one table: a quarter of a gigabyte

Cells = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slicing:
    """How a batch runs: piece `i` is ``batch[i]`` sequences, cut into slices of ``slices[i]`` tokens.

    Attributes:
        num_ranks: pipeline-parallel degree.
        batch: sequences per piece, largest first.
        slices: lengths of the slices of every piece, in the order of the sequence.
        predicted_seconds: seconds of all forwards, then all backwards, through all ranks.
        max_slice_seconds: the longest forward plus the longest backward of a slice.
        gap_seconds: bound of the gap to the best slicing on the same grid.
        peak_tokens: peak tokens per rank whose activations are kept where backwards start early (Seq1F1B).
    """

    num_ranks: int
    batch: tuple[int, ...]
    slices: tuple[tuple[int, ...], ...]
    predicted_seconds: float
    max_slice_seconds: float
    gap_seconds: float
    peak_tokens: int


def slice_batch(
    costs: SliceTime | Sequence[SliceTime],
    *,
    sequence: int,
    num_ranks: int,
    batch: int = 1,
    grid: int = 8,
    epsilon: float | None = None,
    memory_limit: int | None = None,
    max_piece: int | None = None,
    sliced: bool = True,
) -> Slicing:
    """The pieces and slices with the shortest step.

    With forward ``f(i)`` and backward ``b(i)`` of every slice of every piece, the objective is

        sum of (f(i) + b(i)) + (K - 1) (max f(i) + max b(i))        K ranks

    which is exactly the time of all forwards followed by all backwards if ranks have equal costs. Otherwise ``f`` and
    ``b`` are the slowest rank's, and each rank counts towards K with its largest share of the slowest rank's time; the
    objective is then an upper bound of the time.

    Args:
        costs: seconds of a rank on one slice, including its message; a list has one entry per rank. With one rank,
            the messages of `SliceCosts` are left out.
        sequence: sequence length in tokens. Slices begin at multiples of `grid`.
        num_ranks: pipeline-parallel degree, K.
        batch: sequences per step.
        grid: granularity of slice lengths in tokens.
        epsilon: seconds; of longest slices that differ by less, only the longest is tried, which costs at most
            ``(K - 1) epsilon`` per direction. 0 is exact. Default: the answer is within 0.1 % of the best.
        memory_limit: maximum tokens per rank whose activations are kept in the order of Seq1F1B
            (`Slicing.peak_tokens`). The order of the objective, all forwards first, holds the full batch;
            `slice_for_schedule` takes time and memory from the same schedule.
        max_piece: maximum sequences per piece (default: limited by table size).
        sliced: False keeps sequences whole and cuts the batch alone.

    Raises:
        InputError: sizes below 1, a grid above the sequence, negative or infinite costs, or a limit that no slicing
            keeps; the message has the smallest possible limit.
    """
    check_sizes(sequence=sequence, num_ranks=num_ranks, batch=batch, grid=grid)
    cells = np.arange(1, -(-sequence // grid) + 1) if sliced else np.array([-(-sequence // grid)])
    ends = np.minimum(cells * grid, sequence)  # the last cell is shorter where the grid does not divide the sequence
    most = max(1, min(batch, _MOST_ENTRIES // len(ends) ** 2, max_piece or batch))
    tables, seconds, fills = _tables(costs, ends, num_ranks, most, batch)
    widths, tolerance = ([0.0, 0.0], _TOLERANCE) if epsilon is None else ([fill * epsilon for fill in fills], 0.0)
    found = [minimise(part, widths, tolerance) for part in _within(tables, ends, num_ranks, memory_limit)]
    best = min((answer for answer in found if answer is not None), key=lambda answer: answer.objective, default=None)
    if best is None:
        least = min(batch * sequence, sequence + (num_ranks - 1) * int(np.diff(ends, prepend=0).max()))
        cut = f"slices of multiples of {grid} tokens" if sliced else "whole sequences"
        smaller = ", or use a smaller grid" if sliced and grid > 1 else ""
        raise InputError(
            f"memory_limit={memory_limit}: with {cut}, a rank holds at least {least} tokens. Raise memory_limit to "
            f"{least}{smaller}."
        )
    slices = tuple(tuple(int(n) for n in np.diff(ends[np.array(cuts) - 1], prepend=0)) for _, cuts in best.pieces)
    sizes = tuple(tables.sizes[kind] for kind, _ in best.pieces)
    return Slicing(
        num_ranks=num_ranks,
        batch=sizes,
        slices=slices,
        predicted_seconds=best.objective,
        max_slice_seconds=sum(measure(replace(tables, largest=seconds), best.pieces).largest),
        gap_seconds=sum(widths) + tolerance * best.objective,
        peak_tokens=peak_tokens(slices, sizes, num_ranks),
    )


def peak_tokens(slices: Sequence[Sequence[int]], batch: Sequence[int], num_ranks: int) -> int:
    """Upper bound of the tokens whose activations rank 0 holds in the order of Seq1F1B (arXiv:2406.03488).

    Rank 0 runs ahead by one piece plus one slice per other rank, so by at most the largest piece plus one largest slice
    per other rank.
    """
    pieces = [size * sum(lengths) for size, lengths in zip(batch, slices, strict=True)]
    longest = max(size * max(lengths) for size, lengths in zip(batch, slices, strict=True))
    return min(sum(pieces), max(pieces) + (num_ranks - 1) * longest)


def check_sizes(*, sequence: int, num_ranks: int, batch: int, grid: int) -> None:
    """Validate the sizes of a slicing.

    Raises:
        InputError: a size below 1, a grid above the sequence, or a grid too fine to search.
    """
    for what, size in (("sequence", sequence), ("ranks", num_ranks), ("batch", batch), ("grid", grid)):
        if size < 1:
            raise InputError(f"{what}={size}: must be at least 1.")
    if grid > sequence:
        raise InputError(f"grid={grid}: must be at most the sequence, {sequence} tokens. Lower it.")
    if sequence > grid * _MOST_CELLS:
        raise InputError(
            f"grid={grid}: {sequence} tokens make more than {_MOST_CELLS} cells, the limit of the search. Use "
            f"{-(-sequence // _MOST_CELLS)} or more."
        )


def stages_of(costs: SliceTime | Sequence[SliceTime], num_ranks: int) -> list[SliceTime]:
    """The costs of every rank. Raises InputError for another number of costs, or one that is not callable."""
    stages = [costs] * num_ranks if callable(costs) else list(costs) if isinstance(costs, Sequence) else [costs]
    wrong = next((stage for stage in stages if not callable(stage)), None)
    if wrong is not None:
        raise InputError(f"costs={wrong!r}: must be a function of batch, length and context. Pass a function.")
    if len(stages) != num_ranks:
        raise InputError(f"costs has {len(stages)} entries for {num_ranks} ranks. Give one for all, or one per rank.")
    if num_ranks == 1 and isinstance(stages[0], SliceCosts):
        return [replace(stages[0], latency=0.0, seconds_per_token_sent=0.0)]
    return stages


def _tables(
    costs: SliceTime | Sequence[SliceTime], ends: Cells, num_ranks: int, most: int, batch: int
) -> tuple[Tables, tuple[Array, ...], tuple[float, ...]]:
    """Tables of pieces of up to `most` sequences, for the search.

    Also per direction: the seconds of every slice on the slowest rank, and how often the longest counts again.
    """
    ranks = stages_of(costs, num_ranks)
    stages, counts = {id(rank): rank for rank in ranks}, Counter(map(id, ranks))
    starts, stops = np.triu_indices(len(ends))  # a slice is the cells from starts to stops
    context = (ends - np.diff(ends, prepend=0))[starts]
    length = ends[stops] - context
    found = {key: _evaluate(stage, most, length, context) for key, stage in stages.items()}
    slowest = np.max(list(found.values()), axis=0)
    # Of every rank, the largest share of the slowest rank's time that it takes.
    shares = {
        key: np.divide(own, slowest, out=np.ones_like(own), where=slowest > 0).max(axis=(1, 2))
        for key, own in found.items()
    }
    fills = tuple(float(sum(counts[key] * share[phase] for key, share in shares.items())) - 1.0 for phase in (0, 1))

    def by_cells(values: Array) -> Array:
        table = np.full((len(ends), most, len(ends)), np.inf)
        table[stops, :, starts - stops - 1] = values.T
        return table

    seconds = tuple(by_cells(each) for each in slowest)
    largest = tuple(by_cells(fill * each) for fill, each in zip(fills, slowest, strict=True))
    sizes = tuple(range(1, most + 1))
    return Tables(cost=np.add(*seconds), largest=largest, sizes=sizes, batch=batch), seconds, fills


def _evaluate(stage: SliceTime, most: int, length: Cells, context: Cells) -> Array:
    """Seconds of one rank, shape (directions, pieces, slices). Raises InputError for a negative or infinite time."""
    if getattr(stage, "takes_arrays", False):
        seconds = np.array([ask(stage, size, length, context) for size in range(1, most + 1)])
    else:
        pairs = list(zip(length.tolist(), context.tolist(), strict=True))
        seconds = np.array([np.transpose([ask(stage, size, *pair) for pair in pairs]) for size in range(1, most + 1)])
    wrong = np.argwhere(~(np.isfinite(seconds) & (seconds >= 0)))
    if len(wrong):
        size, phase, at = wrong[0]
        raise InputError(
            f"costs(batch={size + 1}, length={length[at]}, context={context[at]}): the "
            f"{('forward', 'backward')[phase]} takes {seconds[size, phase, at]:.6g} s: must be at least 0. Correct the "
            "costs."
        )
    return seconds.swapaxes(0, 1)


def _within(tables: Tables, ends: Cells, num_ranks: int, memory_limit: int | None) -> Iterator[Tables]:
    """The tables within the memory limit, once per size of the largest piece."""
    sequence = int(ends[-1])
    if memory_limit is None or tables.batch * sequence <= memory_limit:
        yield tables
        return
    before = np.concatenate([np.zeros(len(ends), dtype=np.int64), ends])  # starts of the cells; none before the first
    lengths = ends[:, None] - np.lib.stride_tricks.sliding_window_view(before, len(ends))[:-1]
    for size in tables.sizes:
        left = memory_limit - size * sequence
        if left < 0:
            return
        tokens = np.array(tables.sizes)[:, None] * lengths[:, None, :] * (num_ranks - 1)
        yield tables.keep((tokens <= left) & (np.arange(len(tables.sizes)) < size)[:, None])


def uniform(*, sequence: int, num_slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Slices whose lengths differ by at most one multiple; the last one may end short of a multiple.

    Raises:
        InputError: more slices than multiples in the sequence.
    """
    cells = -(-sequence // max(1, multiple))
    if sequence < 1 or multiple < 1 or not 1 <= num_slices <= cells:
        raise InputError(
            f"num_slices={num_slices}: {sequence} tokens in multiples of {multiple} make from 1 to {max(0, cells)} "
            "slices. Use a number in this range."
        )
    return cut([index / num_slices for index in range(1, num_slices)], sequence=sequence, multiple=multiple)


def cut(parts: Sequence[float], *, sequence: int, multiple: int) -> tuple[int, ...]:
    """Slices that end nearest to these fractions of the sequence, and at its end; none is empty."""
    cells = -(-sequence // multiple)
    ends = [0]
    for index, part in enumerate(parts):
        wanted = math.floor(part * sequence / multiple + 0.5)
        ends.append(min(max(wanted, ends[-1] + 1), cells - (len(parts) - index)))
    return tuple(
        min(end * multiple, sequence) - start * multiple for start, end in zip(ends, [*ends[1:], cells], strict=True)
    )
