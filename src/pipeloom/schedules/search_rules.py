"""Greedy phase of the search: many schedules at once, each made in time order by a rule of its own.

A rank looks at the next F, I and W of each of its stages and starts the one whose earliest start plus an *offset* is the
smallest: a number for each op and stage. A large offset of W fills waits with W, a small one of I puts backwards first.
*Limits* bound how many micro-batches of a stage are between F and I, and *patience* says how much sooner an action must
come than the one that is at hand, if it has not been sent yet, for the rank to wait for it.

Why it cannot block: an F starts only if, after it, the oldest micro-batch could still go all its way through the rank,
and then the next, each W run at once (the banker's rule). If an F has no room because of W, W runs in its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.ir.action import Action, Op
from pipeloom.schedules.search_work import IntOrders, Work

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Shop:
    """A step as arrays over ranks and *letters*; a letter is one op of one of the rank's stages: all F, all I, all W.

    A rule is a row of ``num_ranks * genes`` numbers: for each rank the offsets of its letters in seconds, the limits of
    its stages, its patience in seconds.

    Attributes:
        chunks: the most stages of a rank, c; ranks with fewer have letters without actions.
        genes: numbers of a rule for each rank, 4c + 1.
        stages: for each rank and chunk the stage, the last one where there is none.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        placement, m = work.placement, work.num_microbatches
        ranks, self.chunks = placement.num_ranks, placement.num_chunks
        c, size = self.chunks, len(work.actions)
        self.genes = 4 * c + 1
        self.stages = np.full((ranks, c), placement.num_stages - 1)
        zero, never = size, size + 1  # places in the table of ends: long ago, and not in this step
        shape = (ranks, 3 * c, m + 1)
        self._number, self._before, self._lag = np.full(shape, never), np.full(shape, never), np.zeros(shape)
        self._microbatch = np.full((ranks, c, m + 1), m)
        self._first = np.zeros((ranks, c), dtype=np.int64)
        self._every = np.ones((ranks, c), dtype=np.int64)
        self._seconds, self._change = np.zeros((ranks, 3 * c)), np.zeros((ranks, 3 * c))
        self._takes, self._whole = np.zeros((ranks, c)), np.array(work.least_caps())[:, None]
        self._caps = np.array(work.caps)[:, None]
        self._capped = bool(np.isfinite(self._caps).any())
        # The letter whose next action a next F or I waits for: itself where nothing can be said.
        self._source = np.arange(ranks * 3 * c).reshape(ranks, 3 * c)[:, : 2 * c].copy()
        for rank, stages in enumerate(placement.stages_of):
            for chunk, stage in enumerate(stages):
                replicas = placement.replicas[stage]
                self.stages[rank, chunk] = stage
                self._first[rank, chunk], self._every[rank, chunk] = replicas.index(rank), len(replicas)
                mine = range(replicas.index(rank), m, len(replicas))
                self._microbatch[rank, chunk, : len(mine)] = mine
                for letter, op in ((chunk, Op.F), (c + chunk, Op.I), (2 * c + chunk, Op.W)):
                    numbers = [work.number[Action(stage, op, b)] for b in mine]
                    self._fill(rank, letter, numbers, zero)
        self._source_lag = self._lag[:, : 2 * c, 0]

    def _fill(self, rank: int, letter: int, numbers: list[int], zero: int) -> None:
        work, c = self.work, self.chunks
        if not numbers:
            return
        self._number[rank, letter, : len(numbers)] = numbers
        self._before[rank, letter, : len(numbers)] = [
            work.before[n] if work.before[n] >= 0 else zero for n in numbers
        ]
        self._lag[rank, letter, : len(numbers)] = [work.lag[n] for n in numbers]
        first = numbers[0]
        self._seconds[rank, letter] = work.seconds[first]
        self._change[rank, letter] = work.takes[first] - work.frees[first]
        if letter < c:
            self._takes[rank, letter] = work.takes[first]
        source = work.before[first]
        if source >= 0 and not work.replicated:
            other = work.rank[source]
            place = work.placement.stages_of[other].index(work.actions[source].stage)
            self._source[rank, letter] = other * 3 * c + place + (c if letter >= c else 0)

    def play(self, rules: Floats) -> tuple[Floats, npt.NDArray[np.int32]]:
        """The makespan of each rule (a row of `rules`), and the numbers of each rank's actions in order."""
        play = _Play(self, rules)
        left = len(rules) * len(self.work.actions)
        while left:
            left -= play.round()
        return play.free.max(axis=1), play.orders

    def orders(self, row: npt.NDArray[np.int32]) -> IntOrders:
        """One row of the orders of `play` as lists."""
        return [[int(n) for n in order if n >= 0] for order in row]


class _Play:
    """All rules of one call, in rounds: in each, every rank that knows what comes next starts one action."""

    def __init__(self, shop: Shop, rules: Floats) -> None:
        self._shop = shop
        count, c = len(rules), shop.chunks
        ranks, size = len(shop.stages), len(shop.work.actions)
        genes = rules.reshape(count, ranks, shop.genes)
        self._offsets = np.ascontiguousarray(genes[:, :, : 3 * c])
        self._limits = np.maximum(genes[:, :, 3 * c : 4 * c].astype(np.int64), 1)
        self._patience = np.maximum(genes[:, :, 4 * c], 0.0)
        self._ends = np.full((count, size + 2), np.inf)
        self._ends[:, size] = 0.0
        self._row = (np.arange(count) * (size + 2))[:, None, None]
        places = np.arange(ranks * 3 * c).reshape(ranks, 3 * c)
        self._base = places * (shop.work.num_microbatches + 1)
        self._base_f = np.arange(ranks * c).reshape(ranks, c) * (shop.work.num_microbatches + 1)
        self._counts = np.zeros((count, ranks, 3 * c), dtype=np.int64)
        self._held = np.zeros((count, ranks))
        self._done = np.zeros((count, ranks), dtype=np.int64)
        self.free = np.zeros((count, ranks))
        longest = max(len(order) for order in shop.work.one_by_one())
        self.orders = np.full((count, ranks, longest), -1, dtype=np.int32)

    def round(self) -> int:
        """Start what can be started without knowing more; returns how many actions."""
        shop, c, counts = self._shop, self._shop.chunks, self._counts
        cells = self._base + counts
        arrivals = self._ends.take(shop._before.take(cells) + self._row) + shop._lag.take(cells)
        arrivals[:, :, c:][counts[:, :, c:] >= counts[:, :, : 2 * c]] = np.inf
        starts = np.maximum(arrivals, self.free[:, :, None])
        scores = starts + self._offsets
        shut = self._gates(scores)
        choice = scores.argmin(axis=2)[:, :, None]
        score = np.take_along_axis(scores, choice, axis=2)[:, :, 0]
        eager = np.take_along_axis(starts, choice, axis=2)[:, :, 0]
        eager[np.isinf(score)] = np.inf
        waits = self._waits(arrivals, starts, shut, score)
        start = np.where(waits, np.inf, eager)
        stuck = np.isinf(start).all(axis=1)
        start[stuck] = eager[stuck]
        finish = start + np.take_along_axis(np.broadcast_to(shop._seconds, starts.shape), choice, axis=2)[:, :, 0]
        # A rank that starts before any other ends an action learns nothing more in time.
        go = (start < finish.min(axis=1, keepdims=True)) | (start == start.min(axis=1, keepdims=True))
        rows, ranks = (go & np.isfinite(start)).nonzero()
        letters, ends = choice[rows, ranks, 0], finish[rows, ranks]
        numbers = shop._number.take(cells[rows, ranks, letters])
        self._ends[rows, numbers] = ends
        self.free[rows, ranks] = ends
        counts[rows, ranks, letters] += 1
        self._held[rows, ranks] += shop._change[ranks, letters]
        self.orders[rows, ranks, self._done[rows, ranks]] = numbers
        self._done[rows, ranks] += 1
        assert len(rows), "no rule may block"
        return len(rows)

    def _gates(self, scores: Floats) -> npt.NDArray[np.bool_]:
        """Close the F that must not start, lend its urgency to W where W makes its room; returns what else is shut."""
        shop, c, counts = self._shop, self._shop.chunks, self._counts
        forwards, limits = counts[:, :, :c], self._limits
        shut: npt.NDArray[np.bool_] = forwards - counts[:, :, c : 2 * c] >= limits
        if shop._capped:
            coming = shop._microbatch.take(self._base_f + forwards)
            oldest = coming.min(axis=2, keepdims=True)
            ahead = forwards - (oldest - shop._first) // shop._every - 1
            crowd = (np.maximum(ahead, 0) * shop._takes).sum(axis=2, keepdims=True) + shop._whole
            shut |= (coming > oldest) & (crowd + shop._takes > shop._caps)
            full = self._held[:, :, None] + shop._takes > shop._caps
            urgent = np.where(full & ~shut, scores[:, :, :c], np.inf).min(axis=2, keepdims=True)
            weights = scores[:, :, 2 * c :]
            weights[:] = np.where(np.isinf(weights), np.inf, np.minimum(weights, urgent))
            scores[:, :, :c][full] = np.inf
        scores[:, :, :c][shut] = np.inf
        return shut

    def _waits(self, arrivals: Floats, starts: Floats, shut: npt.NDArray[np.bool_], score: Floats) -> Any:
        """Whether a rank would rather wait for an F or I whose sender has not started it yet."""
        shop, c = self._shop, self._shop.chunks
        counts = self._counts.reshape(len(score), -1)
        next_ends = (starts + shop._seconds).reshape(len(score), -1)
        expected = next_ends.take(shop._source, axis=1) + shop._source_lag
        expected[counts.take(shop._source, axis=1) != self._counts[:, :, : 2 * c]] = np.inf
        expected[:, :, :c][shut] = np.inf
        expected[:, :, c:][self._counts[:, :, c : 2 * c] >= self._counts[:, :, :c]] = np.inf
        expected[np.isfinite(arrivals[:, :, : 2 * c])] = np.inf
        best = (np.maximum(expected, self.free[:, :, None]) + self._offsets[:, :, : 2 * c]).min(axis=2)
        return best + self._patience < score
