"""The dynamic programme: the best pipeline of stages with replicas, on one level or on nested levels.

A pipeline of layers i..e over b components begins with a stage of layers i..s on r of them; the rest is a pipeline over
b - r components:

    best(i, e, b) = min( stage(i, e, b),  min over s, r of  max( stage(i, s, r), sent(s, r), rest(s + 1, e, b - r) ) )

`rest` is `best` with the transfer into the first stage. A transfer between stages with r and q replicas is divided by
the smaller number, so it is the larger of sent(s, r) and sent(s, q): each stage counts the two at its own ends.

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
from typing import NamedTuple, Self

import numpy as np

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, folded
from pipeloom.plan.partition.problem import Array, Problem

# Relative difference below which two pipelines count as equal: sums of floats depend on their order.
_EQUAL = 1e-12
_MOST_STEPS = 10**12  # one to six hours on one core


class StageValues(NamedTuple):
    """Values of the stages that begin with one layer and have the same number of replicas.

    Attributes:
        entry: of the transfer into the stage.
        final: of a final stage, shape (last layer,).
        earlier: of an earlier stage, with the transfer behind it: shape (components behind it or 1, last layer without
            the model's last).
    """

    entry: float
    final: Array
    earlier: Array


Step = Callable[[int, int], StageValues]  # by first layer and replicas


@dataclass(frozen=True, slots=True)
class StageNode:
    """A stage: layers `first`..`last` on `replicas` components; in each of these, `inside` are the stages."""

    first: int
    last: int
    replicas: int
    inside: tuple[Self, ...] = ()


def best_suffixes(
    num_layers: int, components: int, step: Step, *, most_replicas: int, add: bool = False, every_end: bool = False
) -> tuple[Array, Array]:
    """Values of the best pipelines that begin with each layer, without and with the transfer into them.

    The value of a pipeline is the largest value of its stages, or with `add` their sum.

    Returns:
        Two arrays of shape (components + 1, layers + 1, ends): ends at the last layer, or each one with `every_end`.
    """
    best = np.full((components + 1, num_layers + 1, num_layers if every_end else 1), np.inf)
    rest = best.copy()
    combine = np.add if add else np.maximum
    for first in reversed(range(num_layers)):
        for replicas in range(1, min(components, most_replicas) + 1):
            entry, final, earlier = step(first, replicas)
            found = final if every_end else final[-1:]
            ends = slice(first, None) if every_end else slice(None)
            for table, value in ((best, found), (rest, combine(entry, found))):
                np.minimum(table[replicas, first, ends], value, out=table[replicas, first, ends])
            if replicas < components and first + 1 < num_layers:
                ends = slice(first + 1, None) if every_end else slice(None)
                behind = rest[1 : components - replicas + 1, first + 1 : num_layers, ends]
                found = combine(earlier[:, :, None], behind).min(axis=1)
                for table, value in ((best, found), (rest, combine(entry, found))):
                    rows = table[replicas + 1 :, first, ends]
                    np.minimum(rows, value, out=rows)
    return best, rest


class Pipelines:
    """Best pipelines over all components of a level, by seconds per minibatch or by memory per rank.

    Args:
        problem: the profile, the cluster and the cost model.
        memory: minimise the memory of the fullest rank instead of the time; a cap is ignored.
        most_replicas: maximum replicas of a stage on each level.

    Raises:
        InputError: the search would take hours.
    """

    def __init__(self, problem: Problem, *, memory: bool = False, most_replicas: int | None = None) -> None:
        self._problem, self._memory = problem, memory
        if self._num_steps() > _MOST_STEPS:
            raise InputError(
                f"{counted(problem.num_layers, 'layer')} on {folded(problem.num_ranks)} ranks: finding their partition "
                "would take hours. Merge layers, or partition for fewer ranks."
            )
        self._most_replicas = most_replicas or problem.num_ranks
        self._sizes = [math.prod(each.components for each in problem.levels[:k]) for k in range(len(problem.levels))]
        self._counts_behind = memory or problem.memory_cap is not None
        self._tables: dict[tuple[int, int], Array] = {}

    def _num_steps(self) -> int:
        """Upper bound of the steps of the dynamic programme, see this module.

        A cap needs the tables inside a component once per number of ranks behind it: at most one per pair of replicas
        and components behind them, and at most one per rank.
        """
        steps, tables, power = 0, 1, 2
        for level in reversed(self._problem.levels):
            steps += tables * level.components**2 * self._problem.cuts.count**power
            if self._problem.memory_cap is not None:
                tables = min(tables * level.components * (level.components + 1) // 2, self._problem.num_ranks + 1)
            power = 3
        return steps

    def by_ranks(self) -> Array:
        """The value for all layers on each number of components of the outermost level, shape (components + 1,)."""
        return self._suffixes(len(self._problem.levels) - 1, 0, every_end=False)[:, 0, 0]

    def plan(self) -> tuple[StageNode, ...]:
        """The fastest pipeline; of several, one with the fewest stages on the outermost level, then inside each."""
        level = len(self._problem.levels) - 1
        return self._plan(level, 0, self._problem.cuts.count - 1, 0, float(self.by_ranks()[-1]))

    def _suffixes(self, level: int, behind: int, *, every_end: bool) -> Array:
        components, step = self._problem.levels[level].components, self._step(level, behind)
        sizes = self._problem.cuts.count, components
        return best_suffixes(*sizes, step, most_replicas=self._most_replicas, every_end=every_end)[0]

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
        none = np.zeros(problem.cuts.count + 1)

        def step(first: int, replicas: int) -> StageValues:
            transfer = none if self._memory else problem.transfer_seconds(level, replicas)
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
            earlier = np.maximum(value[1:] if len(value) > 1 else value, transfer[first + 1 :])[:, :-1]
            return StageValues(float(transfer[first]), value[0], earlier)

        return step

    def _plan(self, level: int, first: int, last: int, behind: int, budget: float) -> tuple[StageNode, ...]:
        """Layers first..last on all components of a level within `budget`, in as few stages as possible.

        Of several possible first stages, the fastest is taken.
        """
        problem = self._problem
        allowed = budget * (1 + _EQUAL)
        timed = self._step(level, behind)

        def stages(start: int, replicas: int) -> StageValues:
            (entry, final, earlier), till = timed(start, replicas), last - start
            counted = [np.where(each <= allowed, 1.0, np.inf) for each in (final[: till + 1], earlier[:, :till])]
            return StageValues(0.0 if entry <= allowed else math.inf, counted[0], counted[1])

        left = problem.levels[level].components
        tables = best_suffixes(last + 1, left, stages, most_replicas=self._most_replicas, add=True)
        begun, counts = (table[:, :, 0] for table in tables)
        fewest = begun[left, first]
        nodes: list[StageNode] = []
        while True:
            end, replicas = self._first_stage(timed, counts, first, last, left, allowed, fewest, entered=bool(nodes))
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
            first, fewest = end + 1, fewest - 1

    def _first_stage(
        self,
        timed: Step,
        counts: Array,
        first: int,
        last: int,
        left: int,
        allowed: float,
        fewest: float,
        *,
        entered: bool,
    ) -> tuple[int, int]:
        """Last layer and replicas of the first stage of a pipeline with `fewest` stages."""
        found = (math.inf, last, left)
        for replicas in range(1, min(left, self._most_replicas) + 1):
            entry, final, earlier = timed(first, replicas)
            if entered and entry > allowed:
                continue
            if replicas == left:
                if fewest == 1 and final[last - first] <= allowed:
                    found = min(found, (float(final[last - first]), last, left))
                continue
            seconds = earlier[min(left - replicas, len(earlier)) - 1, : last - first]
            fits = (seconds <= allowed) & (counts[left - replicas, first + 1 : last + 1] == fewest - 1)
            if fits.any():
                end = int(np.argmin(np.where(fits, seconds, np.inf)))
                found = min(found, (float(seconds[end]), first + end, replicas))
        return found[1], found[2]
