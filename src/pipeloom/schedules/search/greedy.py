"""Greedy phase of the search: makes many schedules in parallel, each in time order by its own rule.

A rank considers the next F, I and W of each of its stages and starts the action with the smallest sum of earliest start
and *offset*, a number per op and stage. A large offset of W fills waits with W; a small offset of I prefers backwards.
*Limits* bound the micro-batches of a stage between F and I. *Patience* is the advantage in seconds for which a rank
waits for an action whose input has not been sent yet.

No rule can block: an F starts only if afterwards the oldest micro-batch can still complete on the rank, and then the
next, each W run at once (the banker's algorithm). If an F has no room because of a pending W, the W runs first.
"""

import numpy as np
import numpy.typing as npt

from pipeloom.ir.action import Action, Op
from pipeloom.schedules.search.operations import IntOrders, Work

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ROUND, _CELL = 110, 0.04  # work of a round, and of each number in its arrays
_CHECK = 16  # rounds between checks for finished rules


class Shop:
    """A step as arrays over ranks and *letters*; a letter is one op of one of the rank's stages: all F, all I, all W.

    A rule is a row of ``num_ranks * genes`` numbers: for each rank the offsets of its letters in seconds, the limits of
    its stages, its patience in seconds.

    Attributes:
        chunks: the most stages of a rank, c; ranks with fewer have letters without actions.
        genes: numbers of a rule per rank, 4c + 1.
        stages: for each rank and chunk the stage; the last stage if there is none.
        spent: work done by `play` so far, about a million per second.
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
        self.number, self.before, self.lag = np.full(shape, never), np.full(shape, never), np.zeros(shape)
        self.microbatch = np.full((ranks, c, m + 1), m)
        self.first = np.zeros((ranks, c, 1), dtype=np.int64)
        self.every = np.ones((ranks, c, 1), dtype=np.int64)
        self.seconds, self.change = np.zeros((ranks, 3 * c)), np.zeros((ranks, 3 * c))
        self.takes, self.whole = np.zeros((ranks, c, 1)), np.array(work.least_caps())[:, None, None]
        self.caps = np.array(work.caps)[:, None, None]
        self.capped = bool(np.isfinite(self.caps).any())
        # The letter whose next action a next F or I waits for: itself where nothing can be said.
        self.source = np.arange(ranks * 3 * c).reshape(ranks, 3 * c)[:, : 2 * c].copy()
        for rank, stages in enumerate(placement.stages_of):
            for chunk, stage in enumerate(stages):
                replicas = placement.replicas[stage]
                self.stages[rank, chunk] = stage
                self.first[rank, chunk], self.every[rank, chunk] = replicas.index(rank), len(replicas)
                mine = range(replicas.index(rank), m, len(replicas))
                self.microbatch[rank, chunk, : len(mine)] = mine
                for letter, op in ((chunk, Op.F), (c + chunk, Op.I), (2 * c + chunk, Op.W)):
                    self._fill(rank, letter, [work.number[Action(stage, op, b)] for b in mine], zero)
        self.source_lag = self.lag[:, : 2 * c, :1]
        self.neighbours = self._neighbours()
        self.sizes = (self.number != never).sum(axis=2)[:, :, None]
        self.lengths = self.sizes.sum(axis=1)
        self.longest = (ranks, int(self.lengths.max()))
        self.spent = 0
        self._cells = ranks * 3 * c

    def _neighbours(self) -> Ints:
        """For each rank, the ranks that send to it, repeated to fill the row."""
        work, ranks = self.work, len(self.stages)
        senders = [{work.rank[work.before[n]] for n in order if work.before[n] >= 0} for order in work.one_by_one()]
        rows = [sorted(mine - {rank}) or list(range(ranks)) for rank, mine in enumerate(senders)]
        longest = max(map(len, rows))
        return np.array([(row * longest)[:longest] for row in rows])

    def _fill(self, rank: int, letter: int, numbers: list[int], zero: int) -> None:
        work, c = self.work, self.chunks
        if not numbers:
            return
        self.number[rank, letter, : len(numbers)] = numbers
        self.before[rank, letter, : len(numbers)] = [work.before[n] if work.before[n] >= 0 else zero for n in numbers]
        self.lag[rank, letter, : len(numbers)] = [work.lag[n] for n in numbers]
        first = numbers[0]
        self.seconds[rank, letter] = work.seconds[first]
        self.change[rank, letter] = work.takes[first] - work.frees[first]
        if letter < c:
            self.takes[rank, letter] = work.takes[first]
        source = work.before[first]
        if source >= 0 and not work.replicated:
            other = work.rank[source]
            place = work.placement.stages_of[other].index(work.actions[source].stage)
            self.source[rank, letter] = other * 3 * c + place + (c if letter >= c else 0)

    def play(self, rules: Floats, limit: float = np.inf) -> tuple[Floats, npt.NDArray[np.int32]]:
        """The makespan of each rule (a row of `rules`), and the numbers of each rank's actions in order.

        Rules whose makespan would exceed `limit` are stopped early, with infinity.
        """
        spans = np.full(len(rules), np.inf)
        orders = np.full((len(rules), *self.longest), -1, dtype=np.int32)
        play = _Play(self, rules)
        rounds = 0
        while len(play.rule):
            play.round()
            rounds += 1
            self.spent += _ROUND + int(_CELL * self._cells * len(play.rule))
            if rounds % _CHECK:
                continue
            left = play.left()
            done = (left == 0.0).all(axis=0)
            spans[play.rule[done]] = play.free.max(axis=0)[done]
            orders[play.rule[done]] = play.orders[done]
            keep = ~done & ((play.free + left).max(axis=0) <= limit)
            if not keep.all():
                play.narrow(keep)
        return spans, orders

    def orders(self, row: npt.NDArray[np.int32]) -> IntOrders:
        """One row of the orders of `play` as lists."""
        return [[int(n) for n in order if n >= 0] for order in row]


class _Play:
    """All rules of one call, in rounds: in each, every rank whose next action is certain starts it.

    Arrays have ranks first, rules last, and letters or chunks between.
    """

    def __init__(self, shop: Shop, rules: Floats) -> None:
        self._shop = shop
        count, c = len(rules), shop.chunks
        ranks, size = len(shop.stages), len(shop.work.actions)
        genes = np.moveaxis(rules.reshape(count, ranks, shop.genes), 0, 2)
        self._offsets = np.ascontiguousarray(genes[:, : 3 * c])
        self._limits = np.maximum(genes[:, 3 * c : 4 * c], 1.0).astype(np.int64)
        self._patience = np.maximum(genes[:, 4 * c], 0.0)
        self._ends = np.full((count, size + 2), np.inf)
        self._ends[:, size] = 0.0
        self.rule = np.arange(count)  # their rows
        width = shop.work.num_microbatches + 1
        places = np.arange(ranks * 3 * c).reshape(ranks, 3 * c)
        self._base = (places * width)[:, :, None]
        self._base_f = (np.arange(ranks * c).reshape(ranks, c) * width)[:, :, None]
        self._counts = np.zeros((ranks, 3 * c, count), dtype=np.int64)
        self._held = np.zeros((ranks, count))
        self._done = np.zeros((ranks, count), dtype=np.int64)
        self.free = np.zeros((ranks, count))
        self.orders = np.full((count, *shop.longest), -1, dtype=np.int32)
        self._index()

    def _index(self) -> None:
        count, ranks = len(self.rule), len(self._base)
        self._row = np.arange(count) * self._ends.shape[1]
        first = (np.arange(ranks) * self._base.shape[1])[:, None]  # letter of each rank, in a flat array
        self._pick = first * count + np.arange(count)

    def left(self) -> Floats:
        """Seconds of what each rank has still to run."""
        left: Floats = ((self._shop.sizes - self._counts) * self._shop.seconds[:, :, None]).sum(axis=1)
        return np.where(self._done == self._shop.lengths, 0.0, np.maximum(left, np.finfo(float).tiny))

    def narrow(self, keep: npt.NDArray[np.bool_]) -> None:
        """Drop rules."""
        for name in ("_offsets", "_limits", "_patience", "_counts", "_held", "_done", "free"):
            setattr(self, name, np.ascontiguousarray(getattr(self, name)[..., keep]))
        self._ends, self.orders, self.rule = self._ends[keep], self.orders[keep], self.rule[keep]
        self._index()

    def round(self) -> None:
        """Start all actions that no later arrival can precede."""
        shop, c, counts, free = self._shop, self._shop.chunks, self._counts, self.free
        cells = self._base + counts
        arrivals = self._ends.take(shop.before.take(cells) + self._row) + shop.lag.take(cells)
        np.copyto(arrivals[:, c:], np.inf, where=counts[:, c:] >= counts[:, : 2 * c])
        starts = np.maximum(arrivals, free[:, None])
        scores = starts + self._offsets
        shut = self._gates(scores)
        choice = scores.argmin(axis=1)
        picked = self._pick + choice * len(self.rule)
        score = scores.take(picked)
        eager = np.where(np.isinf(score), np.inf, starts.take(picked))
        start = np.where(self._waits(arrivals, starts, shut, score), np.inf, eager)
        stuck = np.isinf(start).all(axis=0)
        np.copyto(start, eager, where=stuck)
        finish = start + np.take_along_axis(shop.seconds, choice, axis=1)
        first = finish.min(axis=0)
        # A rank may start before any value that it does not know can come: from a neighbour that is sure of its next
        # action not before that ends, from others not before any action ends.
        sure = np.where(start <= free, finish, first)
        soonest = sure[shop.neighbours].min(axis=1)
        go = (start < soonest) | (start == start.min(axis=0))
        ranks, rules = (go & np.isfinite(start)).nonzero()
        letters, ends = choice[ranks, rules], finish[ranks, rules]
        numbers = shop.number.take(cells[ranks, letters, rules])
        self._ends[rules, numbers] = ends
        free[ranks, rules] = ends
        counts[ranks, letters, rules] += 1
        self._held[ranks, rules] += shop.change[ranks, letters]
        self.orders[rules, ranks, self._done[ranks, rules]] = numbers
        self._done[ranks, rules] += 1
        assert len(rules) or self.left().max() == 0.0, "no rule may block"

    def _gates(self, scores: Floats) -> npt.NDArray[np.bool_]:
        """Exclude each F that must not start; a W that makes room gets its priority. Returns F excluded by limits."""
        shop, c, counts = self._shop, self._shop.chunks, self._counts
        forwards = counts[:, :c]
        shut: npt.NDArray[np.bool_] = forwards - counts[:, c : 2 * c] >= self._limits
        if shop.capped:
            coming = shop.microbatch.take(self._base_f + forwards)
            oldest = coming.min(axis=1, keepdims=True)
            ahead = forwards - (oldest - shop.first) // shop.every - 1
            crowd = (np.maximum(ahead, 0) * shop.takes).sum(axis=1, keepdims=True) + shop.whole
            shut |= (coming > oldest) & (crowd + shop.takes > shop.caps)
            full = self._held[:, None] + shop.takes > shop.caps
            urgent = np.where(full & ~shut, scores[:, :c], np.inf).min(axis=1, keepdims=True)
            weights = scores[:, 2 * c :]
            np.minimum(weights, urgent, out=weights, where=np.isfinite(weights))
            np.copyto(scores[:, :c], np.inf, where=full)
        np.copyto(scores[:, :c], np.inf, where=shut)
        return shut

    def _waits(
        self, arrivals: Floats, starts: Floats, shut: npt.NDArray[np.bool_], score: Floats
    ) -> npt.NDArray[np.bool_]:
        """Whether a rank prefers to wait for an F or I whose sender has not started yet."""
        shop, c, counts = self._shop, self._shop.chunks, self._counts
        count = len(self.rule)
        next_ends = (starts + shop.seconds[:, :, None]).reshape(-1, count)
        expected = next_ends[shop.source] + shop.source_lag
        unknown = (counts.reshape(-1, count)[shop.source] == counts[:, : 2 * c]) & np.isinf(arrivals[:, : 2 * c])
        unknown[:, :c] &= ~shut
        unknown[:, c:] &= counts[:, c : 2 * c] < counts[:, :c]
        best = np.where(unknown, np.maximum(expected, self.free[:, None]) + self._offsets[:, : 2 * c], np.inf)
        waits: npt.NDArray[np.bool_] = best.min(axis=1) + self._patience < score
        return waits
