"""The search for the stages of a synchronous step, from the last layer to the first.

A label stands for the last layers of the model as stages on some of the ranks. It has all that the stages in front of
them need to know, so that one more stage is added in constant time:

    step      seconds of these stages alone, by `pivot_seconds`
    through   the longest way through a pivot Q, there and back: sum of F_s + B_s over s <= Q + (M - 1) (F_Q + B_Q)
    behind    the largest  AR_s - sum of B_a over a <= s

For the paper's pivot, `through` has the forwards up to it and its steady phase, `busy` what an earlier stage must
exceed to become the pivot, and `back` the backwards up to it.

Each label is completed, as in the paper's search, by one stage with all layers in front on all ranks that are left:
these partitions are upper bounds, and so is the partition to start with (`synchronous_start`). A label is dropped if
its lower bound is above the best of them, if its front needs more ranks than are left for so short a step, or if it
is nowhere better than another of the same layers and ranks. What is found is then optimal. Where there are too many
labels, the search gives up with the best partition so far.

With the paper's pivot, a stage in front may lower the estimate, so there are no lower bounds: those with the best
completion are kept, as in the paper's search.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeloom.plan.partition.problem import Array
from pipeloom.plan.partition.stage_costs import Row, StageCosts
from pipeloom.plan.partition.synchronous_start import Stage, needed_ranks, replicas_within

Ints = NDArray[np.int64]

_MOST_TRIED = 500_000  # stages of an exact search
_NEIGHBOURS = 24  # labels that each is compared with
_PUBLISHED_TRIED = 20_000  # stages per cut with the paper's pivot
_PUBLISHED_REPLICAS = 128  # numbers of replicas per stage with the paper's pivot
_PUBLISHED_KEPT = 1_000  # labels per cut with the paper's pivot


@dataclass(slots=True)
class _Labels:
    """Arrays of shape (labels,). See this module for `step`, `through`, `behind`, `busy` and `back`.

    Attributes:
        first, end, replicas: of the first stage.
        used: ranks of all stages.
        stages: number of stages.
        parent: position of the label of the later stages; -1 for none.
        completed: seconds with one more stage in front.
        bound: no partition with these stages is faster.
    """

    first: Ints
    end: Ints
    replicas: Ints
    used: Ints
    stages: Ints
    parent: Ints
    step: Array
    through: Array
    behind: Array
    busy: Array
    back: Array
    completed: Array
    bound: Array

    def at(self, chosen: Any) -> Self:
        return type(self)(*(getattr(self, each.name)[chosen] for each in fields(self)))

    def and_of(self, other: Self) -> Self:
        pairs = ((getattr(self, each.name), getattr(other, each.name)) for each in fields(self))
        return type(self)(*map(np.concatenate, pairs))


def _empty(costs: StageCosts) -> _Labels:
    """One label of no stages, behind the last layer."""
    none, low = np.zeros(1, dtype=np.int64), np.full(1, -np.inf)
    end = none + costs.cuts.count
    values = (low, low, low, low, np.zeros(1))
    return _Labels(end, end, none, none, none, none - 1, *values, np.full(1, np.inf), np.zeros(1))


class SynchronousSearch:
    """Finds the stages with the shortest step.

    Args:
        costs: of stages, and the memory cap.
        start: a partition and its seconds, if one is known.
        published: use the paper's pivot.

    Attributes:
        exact: whether no partition is better than the one that was found.
    """

    def __init__(self, costs: StageCosts, start: tuple[float, list[Stage]] | None, *, published: bool) -> None:
        self._costs, self._published = costs, published
        self._least = costs.least_ranks()
        self._labels = _empty(costs)
        self._seconds, self._start = start or (math.inf, [])
        self._last = -1  # the label that the best partition completes; -1: the partition to start with
        self._tried = 0
        self._needed: Array | None = None  # ranks in front of each cut
        self.exact = not published

    def stages(self) -> list[Stage]:
        """The cuts in front of and behind each stage, and its replicas; empty if no partition was found."""
        count = self._costs.cuts.count
        if math.isfinite(self._seconds) and not self._published:
            self._needed = needed_ranks(replicas_within(self._costs, self._seconds))
        for first in range(count, 0, -1):
            found = self._labels if first == count else self._begin_with(first)
            if self._tried > _MOST_TRIED and not self._published:
                self.exact = False
                return self._path()
            self._complete(found, first)
            self._labels = found if first == count else self._labels.and_of(self._kept(found))
            self._choose()
        return self._path()

    def _begin_with(self, first: int) -> _Labels:
        """The labels of one more stage, which begins at cut `first`."""
        costs, labels = self._costs, self._labels
        live = np.flatnonzero(labels.bound <= self._seconds)
        least, most = self._range(first, live)
        counts = np.maximum(most - least + 1, 0)
        order = np.arange(len(live))
        if self._published:
            counts = np.minimum(counts, _PUBLISHED_REPLICAS)
            order = np.argsort(labels.completed[live], kind="stable")
            order = order[np.cumsum(counts[order]) <= max(_PUBLISHED_TRIED, int(counts[order[0]]) if len(order) else 0)]
        self._tried += int(counts.sum())
        if self._tried > _MOST_TRIED and not self._published:
            return labels.at(slice(0, 0))
        order = order[counts[order] > 0]
        parent = np.repeat(live[order], counts[order])
        place = np.arange(len(parent)) - np.repeat(np.cumsum(counts[order]) - counts[order], counts[order])
        gaps = np.repeat(np.maximum(counts[order] - 1, 1), counts[order])
        replicas = (
            np.repeat(least[order], counts[order]) + place * np.repeat((most - least)[order], counts[order]) // gaps
        )
        later = labels.at(parent)
        end = later.first
        fits = costs.fits(first, end, replicas, later.stages)
        parent, replicas, end, later = parent[fits], replicas[fits], end[fits], later.at(fits)
        values = self._entered(later, first, replicas, end)
        used, stages = later.used + replicas, later.stages + 1
        return _Labels(
            np.full(len(used), first), end, replicas, used, stages, parent, *values, *np.zeros((2, len(used)))
        )

    def _range(self, first: int, live: Ints) -> tuple[Ints, Ints]:
        """The least and the most replicas of a stage from cut `first` in front of labels.

        In the steady phase, no stage takes less than an even share of its ranks, in this stage and in those in front.
        """
        costs, labels = self._costs, self._labels
        end, used, stages = labels.first[live], labels.used[live], labels.stages[live]
        work = costs.forward + costs.backward
        bounded = 0.0 < self._seconds < math.inf and not self._published
        rate = costs.num_microbatches / self._seconds * (1 - 1e-9) if bounded else 0.0
        left = costs.ranks - used
        in_front = max(1.0, math.ceil(work[first] * rate))
        if costs.memory_cap is not None:
            in_front = np.maximum(in_front, self._least[stages + 1, first])
        if self._needed is not None:
            in_front = np.maximum(in_front, self._needed[first])
        least = np.maximum(1.0, np.ceil((work[end] - work[first]) * rate))
        most = np.minimum(left - in_front, costs.most_replicas)
        if costs.samples is not None:
            least = np.maximum(least, left - int(costs.cuts.sizes[first]) * costs.samples)
        possible = (least <= most) & costs.cuts.nested[first, end - 1]
        return np.where(possible, least, 1).astype(np.int64), np.where(possible, most, 0).astype(np.int64)

    def _entered(self, later: _Labels, first: int, replicas: Ints, end: Any) -> tuple[Array, ...]:
        """The values of labels with a stage from cut `first` to `end` in front, and the transfer out of it."""
        costs = self._costs
        values: tuple[Array, ...] = later.step, later.through, later.behind, later.busy, later.back
        if later.stages.any():
            seconds = np.where(later.stages > 0, costs.transfer(end, replicas, later.replicas), 0.0)
            values = self._added((seconds, seconds, 0.0), values)
        return self._added(costs.stage(first, end, replicas), values)

    def _added(self, row: Row, values: tuple[Array, ...]) -> tuple[Array, ...]:
        """Values with a stage, or a transfer, in front."""
        forward, backward, reduce = row
        step, through, behind, busy, back = values
        steady = (self._costs.num_microbatches - 1) * (forward + backward)
        alone = steady + np.maximum(backward + reduce, behind - backward)
        behind = np.maximum(reduce, behind) - backward
        if not self._published:
            step = forward + np.maximum(np.maximum(alone, through + backward + reduce), step)
            return step, forward + backward + np.maximum(steady, through), behind, busy, back
        better = steady > busy
        back = np.where(better, 0.0, back) + backward
        step = forward + np.where(better, alone, np.maximum(step, through + reduce + back))
        through = forward + np.where(better, steady, through)
        return step, through, behind, np.where(better, steady, busy + forward + backward), back

    def _complete(self, labels: _Labels, first: int) -> None:
        """Set `completed` and `bound`."""
        costs, left = self._costs, self._costs.ranks - labels.used
        most = np.minimum(left, costs.most_replicas)
        fits = (left == most) & costs.fits(0, first, most, labels.stages)
        labels.completed = np.where(fits, self._entered(labels, 0, most, first)[0], np.inf)
        if self._published:  # a stage in front may become the pivot and lower the estimate
            return
        share, forward = costs.shares[most], costs.forward[first]
        work = forward + costs.backward[first]
        there = labels.through + work * share
        even = costs.num_microbatches * work / left
        labels.bound = np.maximum(np.maximum(labels.step + forward * share, there), even) * (1 - 1e-12)

    def _kept(self, labels: _Labels) -> _Labels:
        """Without labels that are no better than another one or than the best partition."""
        best = min(self._seconds, float(labels.completed.min(initial=np.inf)))
        labels = labels.at(labels.bound <= best)
        if self._published:
            few = len(labels.used) <= _PUBLISHED_KEPT
            return labels if few else labels.at(np.argpartition(labels.completed, _PUBLISHED_KEPT)[:_PUBLISHED_KEPT])
        labels = labels.at(np.lexsort((labels.through, labels.step, labels.used)))
        keys = [labels.through, labels.behind, -labels.replicas]
        if self._costs.memory_cap is not None:
            keys.append(labels.stages)
        keep = np.ones(len(labels.used), dtype=bool)
        for gap in range(1, min(_NEIGHBOURS, len(keep) - 1) + 1):  # those before it have at most its `step`
            beaten = labels.used[gap:] == labels.used[:-gap]
            for key in keys:
                beaten &= key[gap:] >= key[:-gap]
            keep[gap:] &= ~beaten
        return labels.at(keep)

    def _choose(self) -> None:
        """Remember the best completed label; labels of earlier layers were looked at before."""
        best = int(np.argmin(self._labels.completed))
        if self._labels.completed[best] < self._seconds:
            self._seconds, self._last = float(self._labels.completed[best]), best

    def _path(self) -> list[Stage]:
        if self._last < 0:
            return self._start
        labels, at = self._labels, self._last
        stages = [(0, int(labels.first[at]), self._costs.ranks - int(labels.used[at]))]
        while labels.parent[at] >= 0:
            stages.append((int(labels.first[at]), int(labels.end[at]), int(labels.replicas[at])))
            at = int(labels.parent[at])
        return stages
