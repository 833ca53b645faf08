"""The dynamic programme: the best pipeline of stages with replicas, on one level or on levels inside each other.

A pipeline of layers i..e over b components begins with a stage of layers i..s on r of them; the rest is a pipeline over
b - r components:

    best(i, e, b) = min( stage(i, e, b),  min over s, r of  max( stage(i, s, r), transfer(s), best(s + 1, e, b - r) ) )

A stage takes, on each of its components, what the best pipeline over all components one level below takes; on the
lowest level, what its layers take. PipeDream writes it from the front (the last stage split off); here it goes from the
back, because memory depends on what lies behind: a stage holds ceil(ranks from it on / its ranks) minibatches.

Inside of a component, ranks behind the component count too. There, `behind` is their number over the number of copies
of the component, rounded up: behind a stage of r components there may be b more of u ranks each, and x (so counted)
behind all of these; then each component of that stage has ceil((x + b u) / r) behind it. Rounding in between is no
error, as ceil((ceil(x) + n) / r) = ceil((x + n) / r) for whole n and r.

Time: (layers r)**2 for the outermost level, layers**3 components**2 for those inside; with a memory cap, this once for
each `behind`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeloom.plan.partition.problem import Array, Problem

# Plans whose times are this near, relatively, are equal: sums of the same floats in another order are not.
_EQUAL = 1e-12

# (first layer, replicas) -> values of a stage at the end, shape (last layer), and of one before others, shape
# (components behind or 1, last layer but the very last).
Step = Callable[[int, int], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class Node:
    """A stage: layers `first`..`last` on `replicas` components; in each of these, `inside` are the stages."""

    first: int
    last: int
    replicas: int
    inside: tuple[Node, ...] = ()


def best_suffixes(
    num_layers: int,
    components: int,
    step: Step,
    *,
    most_replicas: int,
    add: bool = False,
    every_end: bool = False,
) -> Array:
    """Values of the best pipelines that begin with each layer, shape (components + 1, layers + 1, ends).

    The value of a pipeline is the largest of its stages, or with `add` their sum. `ends` are the last layer alone, or
    all layers with `every_end`.
    """
    best = np.full((components + 1, num_layers + 1, num_layers if every_end else 1), np.inf)
    combine = np.add if add else np.maximum
    for first in reversed(range(num_layers)):
        for replicas in range(1, min(components, most_replicas) + 1):
            alone, before = step(first, replicas)
            ends = slice(first, None) if every_end else slice(None)
            row = best[replicas, first, ends]
            np.minimum(row, alone if every_end else alone[-1:], out=row)
            if replicas < components and first + 1 < num_layers:
                ends = slice(first + 1, None) if every_end else slice(None)
                rest = best[1 : components - replicas + 1, first + 1 : num_layers, ends]
                found = combine(before[:, :, None], rest).min(axis=1)
                rows = best[replicas + 1 :, first, ends]
                np.minimum(rows, found, out=rows)
    return best


class Pipelines:
    """Best pipelines over all components of a level, by the seconds of a minibatch or by the memory of a rank.

    Args:
        problem: what to partition, and how it is judged.
        memory: find the pipelines with the least memory of the fullest rank, not the fastest; no cap holds.
        most_replicas: of a stage, on every level.
    """

    def __init__(self, problem: Problem, *, memory: bool = False, most_replicas: int | None = None) -> None:
        self._problem, self._memory = problem, memory
        self._most_replicas = most_replicas or problem.num_ranks
        self._sizes = [math.prod(each.components for each in problem.levels[:k]) for k in range(len(problem.levels))]
        self._counts_behind = memory or problem.memory_cap is not None
        self._tables: dict[tuple[int, int], Array] = {}

    def by_ranks(self) -> Array:
        """The value for all layers on each number of components of the outermost level, shape (components + 1,)."""
        level = len(self._problem.levels) - 1
        return self._suffixes(level, self._step(level, 0))[:, 0, 0]

    def plan(self) -> tuple[Node, ...]:
        """A pipeline of least time; of those, one of fewest stages on the outermost level, then inside of each."""
        level = len(self._problem.levels) - 1
        return self._plan(level, 0, self._problem.num_layers - 1, 0, float(self.by_ranks()[-1]))

    def _suffixes(self, level: int, step: Step, *, add: bool = False, every_end: bool = False) -> Array:
        components = self._problem.levels[level].components
        return best_suffixes(
            self._problem.num_layers, components, step, most_replicas=self._most_replicas, add=add, every_end=every_end
        )

    def _table(self, level: int, behind: int) -> Array:
        """For layers i..e on all components of a level, with `behind` ranks behind: shape (layers, layers)."""
        if (level, behind) not in self._tables:
            values = self._suffixes(level, self._step(level, behind), every_end=True)
            self._tables[level, behind] = values[-1, :-1]
        return self._tables[level, behind]

    def _behind(self, level: int, behind: int, replicas: int, components: int) -> int:
        """Ranks behind each component of a stage, see the top."""
        return -(-(behind + components * self._sizes[level]) // replicas) if self._counts_behind else 0

    def _stage(self, level: int, behind: int, first: int, replicas: int) -> Array:
        """Of stages from layer `first` on: shape (components of the level behind them, or 1; last layer)."""
        problem = self._problem
        weights = problem.weights[first, first:]
        others = np.arange(problem.levels[level].components - replicas + 1)
        if level:
            inside = np.stack(
                [
                    self._table(level - 1, self._behind(level, behind, replicas, int(count)))[first, first:]
                    for count in (others if self._counts_behind else others[:1])
                ]
            )
            return inside if self._memory else problem.stage_seconds(inside, weights, replicas, level)
        if not self._counts_behind:
            return problem.stage_seconds(problem.compute[first, first:], weights, replicas, level)[None]
        held = problem.memory_bytes(first, replicas, behind + others)
        if self._memory:
            return held
        seconds = problem.stage_seconds(problem.compute[first, first:], weights, replicas, level)
        return np.where(held <= (problem.memory_cap or np.inf), seconds, np.inf)

    def _step(self, level: int, behind: int) -> Step:
        transfer = np.zeros(self._problem.num_layers) if self._memory else self._problem.transfer_seconds(level)

        def step(first: int, replicas: int) -> tuple[Array, Array]:
            value = self._stage(level, behind, first, replicas)
            return value[0], np.maximum(value[1:] if len(value) > 1 else value, transfer[first:])[:, :-1]

        return step

    def _plan(self, level: int, first: int, last: int, behind: int, budget: float) -> tuple[Node, ...]:
        """Layers first..last on all components of a level within `budget`, in as few stages as possible.

        Where several first stages do, the one that takes least time.
        """
        problem = self._problem
        allowed = budget * (1 + _EQUAL)
        timed = self._step(level, behind)

        def counted(start: int, replicas: int) -> tuple[Array, Array]:
            alone, before = timed(start, replicas)
            till = last - start
            return np.where(alone[: till + 1] <= allowed, 1.0, np.inf), np.where(
                before[:, :till] <= allowed, 1.0, np.inf
            )

        left = problem.levels[level].components
        counts = best_suffixes(last + 1, left, counted, most_replicas=self._most_replicas, add=True)[:, :, 0]
        nodes = []
        while True:
            end, replicas = self._first_stage(timed, counts, first, last, left, allowed)
            left -= replicas
            inside: tuple[Node, ...] = ()
            if level:
                within = self._behind(level, behind, replicas, left)
                best = float(self._table(level - 1, within)[first, end])
                most = problem.inside_seconds(budget, float(problem.weights[first, end]), replicas, level)
                inside = self._plan(level - 1, first, end, within, max(best, most))
            nodes.append(Node(first, end, replicas, inside))
            if end == last:
                return tuple(nodes)
            first = end + 1

    def _first_stage(
        self, timed: Step, counts: Array, first: int, last: int, left: int, allowed: float
    ) -> tuple[int, int]:
        """The last layer and the replicas of the first stage of a pipeline of fewest stages."""
        found = (math.inf, last, left)
        for replicas in range(1, min(left, self._most_replicas) + 1):
            alone, before = timed(first, replicas)
            if replicas == left:
                if counts[left, first] == 1:
                    found = min(found, (float(alone[last - first]), last, left))
                continue
            seconds = before[min(left - replicas, len(before)) - 1, : last - first]
            fits = (seconds <= allowed) & (counts[left - replicas, first + 1 : last + 1] == counts[left, first] - 1)
            if fits.any():
                end = int(np.argmin(np.where(fits, seconds, np.inf)))
                found = min(found, (float(seconds[end]), first + end, replicas))
        return found[1], found[2]
