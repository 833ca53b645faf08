"""The search behind the slicer: the cheapest slices under limits on the longest, and the best limits.

The objective is ``sum of costs + sum over directions of the largest cost x the remaining ranks``. With a limit on the
largest cost of each direction it splits into a dynamic programme over slices (TeraPipe, arXiv:2102.07988) and a
knapsack over pieces of the batch. The paper tries every limit. Here, a few coarse limits first give a good answer, and
slices that no better answer can contain are dropped. Then a branch-and-bound over boxes of limits tries few of them:
the answer under a box's highest limits bounds the sum from below, and its lowest limits bound the rest.
"""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeloom.plan.slicing.slice_costs import Array

_MOST_ENTRIES = 2**22  # of the tables in memory together
_MOST_AT_ONCE = 16  # limits tried together
Pieces = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Costs of every possible slice. Slice ``[end - 1, piece, at]`` has the cells from ``end - width + at`` to `end`.

    Attributes:
        cost: cost in the sum, shape (cells, pieces, width); infinite where there is no slice.
        largest: cost of being the largest, one table per direction; infinite where there is no slice.
        sizes: samples of each kind of piece, ascending.
        batch: total samples of all pieces.
    """

    cost: Array
    largest: tuple[Array, ...]
    sizes: tuple[int, ...]
    batch: int

    def keep(self, allowed: NDArray[np.bool_]) -> Self:
        """The allowed slices only, as narrow as possible."""
        wide = np.flatnonzero(allowed.any(axis=(0, 1)))
        first = int(wide[0]) if len(wide) else allowed.shape[2] - 1
        cost, *largest = (
            np.where(allowed[:, :, first:], table[:, :, first:], np.inf) for table in (self.cost, *self.largest)
        )
        return replace(self, cost=cost, largest=tuple(largest))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Pieces ``(kind, ends of its slices)``, the sum of their costs, and the largest in each direction."""

    pieces: Pieces
    total: float
    largest: tuple[float, ...]

    @property
    def objective(self) -> float:
        return self.total + sum(self.largest)


def minimise(tables: Tables, widths: Sequence[float], tolerance: float = 0.0) -> Answer | None:
    """The best slices and pieces up to a gap; None if none are possible.

    No answer is better by more than the sum of `widths` plus `tolerance` times the answer.

    Args:
        tables: the costs.
        widths: bucket width of the largest cost per direction; only the greatest value of each bucket is tried.
        tolerance: relative gap at which the search stops.
    """
    best = _coarse(tables)
    if best is None:
        return None
    floor = _floor(tables)
    tables = tables.keep(floor <= best.objective * (1 + 1e-12))
    # The largest sum is at most the sum of the largest costs, so one limit on the sum of all directions gives a lower
    # bound. Directions usually have similar costs; then its answer reaches the bound and is the best.
    together = replace(tables, largest=(np.sum(tables.largest, axis=0),))
    # Half of the widths is for the buckets, the other half for the remaining gap to the bound.
    best, low = _search(together, [sum(widths) / 2], tolerance / 2, measured_by=tables, known=best)
    if best.objective - low > sum(widths) / 2 + (tolerance + 1e-12) * best.objective:
        tables = tables.keep(floor[:, :, -tables.cost.shape[2] :] <= best.objective * (1 + 1e-12))
        best, _ = _search(tables, widths, tolerance, measured_by=tables, known=best)
    return best


def _coarse(tables: Tables) -> Answer | None:
    """A good answer: the limit on the largest slice is halved until the answer does not improve."""
    best = None
    while True:
        [answer] = _under(tables, [[np.inf] * len(tables.largest)])
        if answer is None or (best is not None and answer.objective >= best.objective):
            return best
        best = answer
        tables = tables.keep(np.sum(tables.largest, axis=0) <= sum(answer.largest) / 2)


def _floor(tables: Tables) -> Array:
    """Lower bound of every answer that contains a slice: the least sums around it, and itself as the largest."""
    cells, pieces, width = tables.cost.shape
    before = _slice(tables.cost)
    after = np.full((pieces, width + cells + 1), np.inf)  # of the later cells
    after[:, -1] = 0.0
    for end in range(cells, 0, -1):
        starts = after[:, end : end + width]
        np.minimum(starts, tables.cost[end - 1] + after[:, end + width, None], out=starts)
    sums, _ = _knapsack(before[:, -1], tables.sizes, tables.batch)
    rest = sums[tables.batch - np.array(tables.sizes)]
    sides = np.lib.stride_tricks.sliding_window_view(before, width, axis=1)[:, 1 : cells + 1]
    sides = sides + (after[:, width + 1 :] + rest[:, None])[:, :, None]
    return np.asarray(sides.swapaxes(0, 1) + tables.cost + np.sum(tables.largest, axis=0))


def _search(
    tables: Tables, widths: Sequence[float], tolerance: float, *, measured_by: Tables, known: Answer
) -> tuple[Answer, float]:
    """The best answer by the largest values of `measured_by`, and a lower bound of all objectives by `tables`, up to
    buckets. The search starts from the answer `known`.

    With equal tables the answer is optimal; otherwise the search ends when `tables` has nothing below the bound.
    """
    values = [_candidates(table, width) for table, width in zip(tables.largest, widths, strict=True)]
    best, least = known, known.objective
    order = itertools.count()
    start = tuple(len(each) - 1 for each in values)
    boxes = [(0.0, next(order), (0,) * len(values), start)]
    at_once = max(1, min(_MOST_AT_ONCE, _MOST_ENTRIES // tables.cost.size))
    while boxes:
        if boxes[0][0] >= least * (1 - tolerance):
            return best, min(boxes[0][0], least)
        taken = [heapq.heappop(boxes) for _ in range(min(at_once, len(boxes)))]
        limits = [[float(each[h]) for each, h in zip(values, high, strict=True)] for _, _, _, high in taken]
        for (_, _, low, high), answer in zip(taken, _under(tables, limits), strict=True):
            if answer is None:
                continue
            measured = measure(measured_by, answer.pieces)
            if measured.objective < best.objective:
                best = measured
            least = min(least, answer.objective)
            # All limits from the reached to the highest have this answer; the others have a limit below the reached.
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
    """The distinct finite values, ascending; only the greatest per bucket of `width`."""
    values = np.unique(table[np.isfinite(table)])
    if not len(values) or width <= 1e-12 * values[-1]:
        return values
    bucket = np.floor((values - values[0]) / width)
    return np.asarray(values[np.append(bucket[1:] != bucket[:-1], True)])


def measure(tables: Tables, pieces: Pieces) -> Answer:
    """The sum and the largest values of these pieces by `tables`."""
    width = tables.cost.shape[2]
    chosen = [
        (end - 1, kind, start - end + width)
        for kind, ends in pieces
        for start, end in zip((0, *ends), ends, strict=False)  # the last start is unused
    ]
    index = tuple(np.array(chosen).T)
    return Answer(
        pieces=pieces,
        total=float(tables.cost[index].sum()),
        largest=tuple(float(table[index].max()) for table in tables.largest),
    )


def _under(tables: Tables, limits: Sequence[Sequence[float]]) -> list[Answer | None]:
    """For each list of limits, the least sum with no slice above them; None if there is none.

    Lists are solved together, because Python's overhead exceeds the arithmetic of small tables.
    """
    cells, pieces, width = tables.cost.shape
    columns = [np.array(each)[:, None, None] for each in zip(*limits, strict=True)]
    allowed = np.logical_and.reduce([t[:, None] <= each for t, each in zip(tables.largest, columns, strict=True)])
    cost = np.where(allowed, tables.cost[:, None], np.inf).reshape(cells, len(limits) * pieces, width)
    best = _slice(cost)
    kinds = [_kinds(sums, tables.sizes, tables.batch) for sums in best[:, -1].reshape(len(limits), pieces)]
    lanes = sorted({index * pieces + kind for index, each in enumerate(kinds) for kind in each or ()})
    ends = dict(zip(lanes, _paths(cost[:, lanes], best[lanes]), strict=True))
    answers: list[Answer | None] = []
    for index, each in enumerate(kinds):
        found = tuple((kind, ends[index * pieces + kind]) for kind in each or ())
        answers.append(measure(tables, found) if each is not None else None)
    return answers


def _slice(cost: Array) -> Array:
    """``best[..., width + end]``: the least sum of slices from the beginning up to each cell; infinite before it."""
    cells, *others, width = cost.shape
    best = np.full((*others, width + cells + 1), np.inf)
    best[..., width] = 0.0
    options = np.empty((*others, width))
    for end in range(1, cells + 1):
        np.add(best[..., end : end + width], cost[end - 1], out=options)
        np.minimum.reduce(options, axis=-1, out=best[..., end + width])
    return best


def _paths(cost: Array, best: Array) -> list[tuple[int, ...]]:
    """For each lane (the second dimension of `cost`), the ends of the slices that reach ``best[lane, -1]``."""
    cells, lanes, width = cost.shape
    lane, end = np.arange(lanes), np.full(lanes, cells)
    found: list[list[int]] = [[] for _ in range(lanes)]
    while len(lane):
        for one, at in zip(lane.tolist(), end.tolist(), strict=True):
            found[one].append(at)
        reached = best[lane[:, None], end[:, None] + np.arange(width)] + cost[end - 1, lane]
        end = end - width + np.argmin(reached, axis=1)
        lane, end = lane[end > 0], end[end > 0]
    return [tuple(ends[::-1]) for ends in found]


def _knapsack(sums: Array, sizes: Sequence[int], batch: int) -> tuple[Array, NDArray[np.int64]]:
    """For each batch up to this one, the least sum of pieces that make it up, and the kind of the last of them."""
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
    return least, last


def _kinds(sums: Array, sizes: Sequence[int], batch: int) -> tuple[int, ...] | None:
    """The kinds of pieces, largest first, that make up `batch` with the least sum; None where nothing does."""
    least, last = _knapsack(sums, sizes, batch)
    if not np.isfinite(least[batch]):
        return None
    kinds = []
    while batch:
        kinds.append(int(last[batch]))
        batch -= sizes[kinds[-1]]
    return tuple(sorted(kinds, reverse=True))
