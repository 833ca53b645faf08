"""The search behind the slicer: the cheapest slices under limits on the longest, and the best limits.

What is minimised is ``sum of costs + sum over directions of the largest cost x the ranks still to come``. With a limit
on the largest of each direction it falls apart into a dynamic programme over slices (TeraPipe, arXiv:2102.07988) and a
knapsack over pieces of the batch. The paper tries every limit. Here, boxes of limits wait in a heap by a bound of
what they can hold, so that few are tried: the answer under a box's highest limits bounds the sum from below, its
lowest limits bound the rest.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeloom.plan.slicing.costs import Array

_MOST_ENTRIES = 2**22  # of the tables that are worked on at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """What every possible slice costs. Slice ``[piece, end - 1, start]`` holds the cells from `start` up to `end`.

    Attributes:
        cost: what it adds to the sum, shape (pieces, cells, cells); infinite where there is no such slice.
        largest: what it adds by being the largest, one table for each direction.
        sizes: samples of each kind of piece, ascending.
        batch: samples to be made up of pieces.
    """

    cost: Array
    largest: tuple[Array, ...]
    sizes: tuple[int, ...]
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Pieces ``(kind, ends of its slices)``, the sum of their costs, and the largest in each direction."""

    pieces: tuple[tuple[int, tuple[int, ...]], ...]
    total: float
    largest: tuple[float, ...]

    @property
    def objective(self) -> float:
        return self.total + sum(self.largest)


def minimise(tables: Tables, widths: Sequence[float], tolerance: float = 0.0) -> Answer | None:
    """The best slices and pieces, or nearly; None where none are possible.

    Nothing is better by more than the sum of `widths` and `tolerance` times the answer.

    Args:
        tables: the costs.
        widths: for each direction, how far apart values of the largest may be to be tried as one: of each bucket of
            this width the greatest is tried.
        tolerance: part of the answer by which a better one is not looked for.
    """
    # The largest of a sum is at most the sum of the largest, so one limit on the sum of all directions gives a bound
    # from below; where the directions cost alike, as they do, its answer reaches the bound and is the best.
    together = replace(tables, largest=(np.sum(tables.largest, axis=0),))
    # Half of the widths for the buckets, the other half for the distance from the bound that they leave.
    best, low = _search(together, [sum(widths) / 2], tolerance / 2, measured_by=tables)
    if best is not None and best.objective - low > sum(widths) / 2 + (tolerance + 1e-12) * best.objective:
        best, _ = _search(tables, widths, tolerance, measured_by=tables, known=best)
    return best


def _search(
    tables: Tables,
    widths: Sequence[float],
    tolerance: float,
    *,
    measured_by: Tables,
    known: Answer | None = None,
) -> tuple[Answer | None, float]:
    """The answer that is best by the largest values of `measured_by`; and what no objective by `tables` is below,
    buckets aside.

    Where the two tables are the same, that is the best there is; else the search ends when `tables` has nothing below.
    """
    values = [_candidates(table, width) for table, width in zip(tables.largest, widths, strict=True)]
    best, least = known, np.inf if known is None else known.objective
    if any(not len(each) for each in values):
        return None, np.inf
    order = itertools.count()
    start = tuple(len(each) - 1 for each in values)
    boxes = [(0.0, next(order), (0,) * len(values), start)]
    at_once = max(1, min(8, _MOST_ENTRIES // tables.cost.size))
    while boxes:
        if boxes[0][0] >= least * (1 - tolerance):
            return best, min(boxes[0][0], least)
        taken = [heapq.heappop(boxes) for _ in range(min(at_once, len(boxes)))]
        limits = [[float(each[h]) for each, h in zip(values, high, strict=True)] for _, _, _, high in taken]
        for (_, _, low, high), answer in zip(taken, _under(tables, limits), strict=True):
            if answer is None:
                continue
            measured = measure(measured_by, answer)
            if best is None or measured.objective < best.objective:
                best = measured
            least = min(least, answer.objective)
            # All limits between the reached and the highest have this answer; the others have one limit below it.
            reached = tuple(int(np.searchsorted(each, v)) for each, v in zip(values, answer.largest, strict=True))
            for part in _below(reached, low, high):
                for low_, high_ in _halves(values, *part):
                    floor = answer.total + sum(float(each[i]) for each, i in zip(values, low_, strict=True))
                    if floor < least:
                        heapq.heappush(boxes, (floor, next(order), low_, high_))
    return best, least


Corner = tuple[int, ...]


def _below(reached: Corner, low: Corner, high: Corner) -> Iterator[tuple[Corner, Corner]]:
    """The box from `low` to `high` without the box from `reached` to `high`, as boxes that do not overlap."""
    for axis, at in enumerate(reached):
        if low[axis] < at:
            yield low, (*high[:axis], at - 1, *high[axis + 1 :])
            low = (*low[:axis], at, *low[axis + 1 :])


def _halves(values: Sequence[Array], low: Corner, high: Corner) -> Iterator[tuple[Corner, Corner]]:
    """The box in two, across the axis on which its values are widest apart."""
    extents = [float(each[h] - each[i]) for each, i, h in zip(values, low, high, strict=True)]
    axis = max(range(len(extents)), key=extents.__getitem__)
    if low[axis] == high[axis]:
        yield low, high
        return
    each = values[axis]
    middle = int(np.searchsorted(each, (each[low[axis]] + each[high[axis]]) / 2))
    middle = min(max(middle, low[axis]), high[axis] - 1)
    yield low, (*high[:axis], middle, *high[axis + 1 :])
    yield (*low[:axis], middle + 1, *low[axis + 1 :]), high


def _candidates(table: Array, width: float) -> Array:
    """The different finite values, ascending; of those in one bucket of `width` the greatest alone."""
    values = np.unique(table[np.isfinite(table)])
    if not len(values) or width <= 1e-12 * values[-1]:
        return values
    bucket = np.floor((values - values[0]) / width)
    return np.asarray(values[np.append(bucket[1:] != bucket[:-1], True)])


def measure(tables: Tables, answer: Answer) -> Answer:
    """`answer` with the largest values of `tables`."""
    chosen = [
        (kind, end - 1, start)
        for kind, ends in answer.pieces
        for start, end in zip((0, *ends), ends, strict=False)  # one start too many
    ]
    index = tuple(np.array(chosen).T)
    return Answer(
        pieces=answer.pieces,
        total=float(tables.cost[index].sum()),
        largest=tuple(float(table[index].max()) for table in tables.largest),
    )


def _under(tables: Tables, limits: Sequence[Sequence[float]]) -> list[Answer | None]:
    """For each list of limits, the least sum with no slice above them; None if there is none.

    Several at once, as small tables take less time than Python does to go through them.
    """
    cost = np.empty((len(limits), *tables.cost.shape))
    for own, each in zip(cost, limits, strict=True):
        allowed = np.logical_and.reduce([t <= limit for t, limit in zip(tables.largest, each, strict=True)])
        own[:] = np.where(allowed, tables.cost, np.inf)
    best = _slice(cost)
    return [_put_together(tables, *each) for each in zip(cost, best, strict=True)]


def _put_together(tables: Tables, cost: Array, best: Array) -> Answer | None:
    """The pieces of the batch, from what `_slice` found."""
    kinds = _knapsack(best[:, -1], tables.sizes, tables.batch)
    if kinds is None:
        return None
    paths = {kind: _path(cost[kind], best[kind]) for kind in set(kinds)}
    return measure(tables, Answer(pieces=tuple((kind, paths[kind]) for kind in kinds), total=0.0, largest=()))


def _slice(cost: Array) -> Array:
    """``best[..., end]``: the least sum of slices from the beginning up to each cell."""
    *others, cells, _ = cost.shape
    best = np.full((*others, cells + 1), np.inf)
    best[..., 0] = 0.0
    options = np.empty((*others, cells))
    for end in range(1, cells + 1):
        part = np.add(best[..., :end], cost[..., end - 1, :end], out=options[..., :end])
        np.minimum.reduce(part, axis=-1, out=best[..., end])
    return best


def _path(cost: Array, best: Array) -> tuple[int, ...]:
    """The ends of the slices that reach ``best[-1]``."""
    ends = [len(best) - 1]
    while ends[-1] > 0:
        end = ends[-1]
        ends.append(int(np.argmin(best[:end] + cost[end - 1, :end])))
    return tuple(ends[-2::-1])


def _knapsack(sums: Array, sizes: Sequence[int], batch: int) -> tuple[int, ...] | None:
    """The kinds of pieces, largest first, that make up `batch` with the least sum; None where nothing does."""
    least = np.full(batch + 1, np.inf)
    least[0] = 0.0
    last = np.zeros(batch + 1, dtype=np.int64)
    reach = np.array(sizes)
    for total in range(1, batch + 1):
        fitting = int(np.searchsorted(reach, total, side="right"))
        options = least[total - reach[:fitting]] + sums[:fitting]
        if fitting:
            last[total] = int(np.argmin(options))
            least[total] = options[last[total]]
    if not np.isfinite(least[batch]):
        return None
    kinds = []
    while batch:
        kinds.append(int(last[batch]))
        batch -= sizes[kinds[-1]]
    return tuple(sorted(kinds, reverse=True))
