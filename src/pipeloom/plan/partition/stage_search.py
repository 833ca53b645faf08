"""The dynamic programme: the best pipeline of stages with replicas, on one level or on nested levels.

A pipeline of layers i..e over b components begins with a stage of layers i..s on r of them; the rest is a pipeline over
b - r components:

    best(i, e, b) = min( stage(i, e, b),  min over s, r of  max( stage(i, s, r), transfer(s), best(s + 1, e, b - r) ) )

On each of its components, a stage takes the time of the best pipeline over all components one level below; on the
lowest level, the time of its layers. PipeDream's recursion splits off the last stage. This one splits off the first,
because memory depends on the later stages: a stage holds ceil(ranks of this and later stages / its ranks) minibatches.

Inside a component, the ranks behind the component count too. There, `behind` is their number divided by the replicas of
the component, rounded up. With b components of u ranks each behind a stage of r components, and x ranks (counted
likewise) behind these, each component of the stage has ceil((x + b u) / r) ranks behind it. Rounding in between is
exact: ceil((ceil(x) + n) / r) = ceil((x + n) / r) for integers n and r.

Time: (layers r)**2 for the outermost level, layers**3 components**2 for those inside; with a memory cap, once per
value of `behind`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipeloom.plan.partition.problem import Array, Problem

# Relative difference below which two pipelines count as equal: sums of floats depend on their order.
_EQUAL = 1e-12

# (first layer, replicas) -> values of a final stage, shape (last layer), and of an earlier stage, shape (components
# behind it or 1, last layer without the model's last).
Step = Callable[[int, int], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage: layers `first`..`last` on `replicas` components; in each of these, `inside` are the stages."""

    first: int
    last: int
    replicas: int
    inside: tuple[Self, ...] = ()


def best_suffixes(
    num_layers: int, components: int, step: Step, *, most_replicas: int, add: bool = False, every_end: bool = False
) -> Array:
    """Values of the best pipelines that begin with each layer, shape (components + 1, layers + 1, ends).

    The value of a pipeline is the largest value of its stages, or with `add` their sum. `ends` is the last layer, or
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
    """Best pipelines over all components of a level, by seconds per minibatch or by memory per rank.

    Args:
        problem: the profile, the cluster and the cost model.
        memory: minimise the memory of the fullest rank instead of the time; a cap is ignored.
        most_replicas: maximum replicas of a stage on each level.
    """

    def __init__(self, problem: Problem, *, memory: bool = False, most_replicas: int | None = None) -> None:
        self._problem, self._memory = problem, memory
        self._most_replicas = most_replicas or problem.num_ranks
        self._sizes = [math.prod(each.components for each in problem.levels[:k]) for k in range(len(problem.levels))]
        self._counts_behind = memory or problem.memory_cap is not None
        self._tables: dict[tuple[int, int], Array] = {}

    def by_ranks(self) -> Array:
        """The value for all layers on each number of components of the outermost level, shape (components + 1,)."""
        return self._suffixes(len(self._problem.levels) - 1, 0, every_end=False)[:, 0, 0]

    def plan(self) -> tuple[StageNode, ...]:
        """The fastest pipeline; of several, one with the fewest stages on the outermost level, then inside each."""
        level = len(self._problem.levels) - 1
        return self._plan(level, 0, self._problem.num_layers - 1, 0, float(self.by_ranks()[-1]))

    def _suffixes(self, level: int, behind: int, *, every_end: bool) -> Array:
        components, step = self._problem.levels[level].components, self._step(level, behind)
        sizes = self._problem.num_layers, components
        return best_suffixes(*sizes, step, most_replicas=self._most_replicas, every_end=every_end)

    def _table(self, level: int, behind: int) -> Array:
        """Values for layers i..e on all components of a level, with `behind` ranks behind: shape (layers, layers)."""
        if (level, behind) not in self._tables:
            self._tables[level, behind] = self._suffixes(level, behind, every_end=True)[-1, :-1]
        return self._tables[level, behind]

    def _behind(self, level: int, behind: int, replicas: int, components: int) -> int:
        """Ranks behind each component of a stage, see this module."""
        return -(-(behind + components * self._sizes[level]) // replicas) if self._counts_behind else 0

    def _step(self, level: int, behind: int) -> Step:
        """Values of the stages of a level, with `behind` ranks behind its components."""
        problem, components = self._problem, self._problem.levels[level].components
        transfer = np.zeros(problem.num_layers) if self._memory else problem.transfer_seconds(level)

        def step(first: int, replicas: int) -> tuple[Array, Array]:
            weights = problem.weights[first, first:]
            others = np.arange(components - replicas + 1 if self._counts_behind else 1)  # behind the stage
            if level:
                ranks = (self._behind(level, behind, replicas, int(count)) for count in others)
                inside = np.stack([self._table(level - 1, each)[first, first:] for each in ranks])
                value = inside if self._memory else problem.stage_seconds(inside, weights, replicas, level)
            else:
                value = problem.stage_seconds(problem.compute[first, first:], weights, replicas, level)[None]
                if self._counts_behind:
                    held = problem.memory_bytes(first, replicas, behind + others)
                    value = held if self._memory else np.where(held <= (problem.memory_cap or np.inf), value, np.inf)
            return value[0], np.maximum(value[1:] if len(value) > 1 else value, transfer[first:])[:, :-1]

        return step

    def _plan(self, level: int, first: int, last: int, behind: int, budget: float) -> tuple[StageNode, ...]:
        """Layers first..last on all components of a level within `budget`, in as few stages as possible.

        Of several possible first stages, the fastest is taken.
        """
        problem = self._problem
        allowed = budget * (1 + _EQUAL)
        timed = self._step(level, behind)

        def stages(start: int, replicas: int) -> tuple[Array, Array]:
            (alone, before), till = timed(start, replicas), last - start
            counted = [np.where(each <= allowed, 1.0, np.inf) for each in (alone[: till + 1], before[:, :till])]
            return counted[0], counted[1]

        left = problem.levels[level].components
        counts = best_suffixes(last + 1, left, stages, most_replicas=self._most_replicas, add=True)[:, :, 0]
        nodes = []
        while True:
            end, replicas = self._first_stage(timed, counts, first, last, left, allowed)
            left -= replicas
            inside: tuple[StageNode, ...] = ()
            if level:
                within = self._behind(level, behind, replicas, left)
                best = float(self._table(level - 1, within)[first, end])
                most = problem.inside_seconds(budget, float(problem.weights[first, end]), replicas, level)
                inside = self._plan(level - 1, first, end, within, max(best, most))
            nodes.append(StageNode(first, end, replicas, inside))
            if end == last:
                return tuple(nodes)
            first = end + 1

    def _first_stage(
        self, timed: Step, counts: Array, first: int, last: int, left: int, allowed: float
    ) -> tuple[int, int]:
        """Last layer and replicas of the first stage of a pipeline with the fewest stages."""
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
