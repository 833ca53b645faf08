"""Improves a partition for synchronous steps: moves cuts, and ranks from stages that need them least to others."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.plan.partition.problem import Array
from pipeloom.plan.partition.stage_costs import StageCosts
from pipeloom.plan.partition.synchronous_start import Stage

Ints = NDArray[np.int64]
Judge = Callable[[Sequence[tuple[Any, Any, Any]]], Any]

_MOST_JUDGED = 10_000_000  # stages of the partitions that are judged
_PAIRED = 6  # stages that give ranks, and that take them, in a round


def refined(starts: Sequence[list[Stage]], costs: StageCosts, judge: Judge) -> list[Stage]:
    """Moves ranks and layers between stages as long as the step becomes shorter, and returns the best partition.

    Args:
        starts: partitions, the best first.
        costs: says which partitions are possible.
        judge: seconds of partitions, each number an array.
    """
    left = float(_MOST_JUDGED)
    found = []
    for start in starts:
        stages, seconds, judged = _improved(start, costs, judge, left)
        left -= judged
        found.append((seconds, stages))
    return min(found)[1]


def _improved(stages: list[Stage], costs: StageCosts, judge: Judge, most: float) -> tuple[list[Stage], float, float]:
    """A partition, its seconds, and how many stages were judged."""
    firsts, replicas = (np.array([each[k] for each in stages]) for k in (0, 2))
    seconds, judged = float(judge(stages)), 0.0
    while judged < most:
        judged += len(stages) * (8 * len(stages) + (2 * len(stages) + _PAIRED**2) * int(replicas.max()).bit_length())
        moved = _possible(*_moves(firsts, replicas, costs, judge), costs)
        if not len(moved[0]):
            break
        found = _judged(*moved, costs, judge)
        best = int(np.argmin(found))
        if not found[best] < seconds * (1 - 1e-12):
            break
        seconds, firsts, replicas = float(found[best]), moved[0][best], moved[1][best]
    ends = [*firsts[1:], costs.cuts.count]
    return [(int(f), int(e), int(r)) for f, e, r in zip(firsts, ends, replicas, strict=True)], seconds, judged


def _columns(firsts: Ints, replicas: Ints, costs: StageCosts) -> list[tuple[Ints, Ints, Ints]]:
    """Cuts and replicas of partitions of shape (partitions, stages), by stage."""
    ends = np.concatenate((firsts[:, 1:], np.full((len(firsts), 1), costs.cuts.count)), axis=1)
    return list(zip(firsts.T, ends.T, replicas.T, strict=True))


def _judged(firsts: Ints, replicas: Ints, costs: StageCosts, judge: Judge) -> Array:
    with np.errstate(invalid="ignore"):
        seconds = np.asarray(judge(_columns(firsts, replicas, costs)), dtype=np.float64)
    return np.broadcast_to(np.where(np.isnan(seconds), np.inf, seconds), len(firsts))


def _moves(firsts: Ints, replicas: Ints, costs: StageCosts, judge: Judge) -> tuple[Ints, Ints]:
    """Neighbours of a partition: first cuts and replicas, shape (partitions, stages)."""
    count = len(firsts)
    one = np.eye(count, dtype=np.int64)
    cuts = [firsts + sign * by * row for by in (1, 2, 4, 8) for row in one[1:] for sign in (1, -1)]
    given = []
    size = 1
    while size < replicas.max():
        more, less = np.minimum(replicas + size * one, costs.most_replicas), replicas - size * one
        takes = np.argsort(_judged(*_one_changed(firsts, more), costs, judge))
        may = np.flatnonzero(replicas > size)
        if len(may):
            gives = may[np.argsort(_judged(*_one_changed(firsts, less[may]), costs, judge))]
            for giver in gives[:_PAIRED]:
                for taker in takes[:_PAIRED]:
                    if giver != taker:
                        given.append(less[giver] + size * one[taker])
        size *= 2
    moved = np.array(cuts + [firsts] * len(given), dtype=np.int64).reshape(-1, count)
    return moved, np.array([replicas] * len(cuts) + given, dtype=np.int64).reshape(-1, count)


def _one_changed(firsts: Ints, replicas: Ints) -> tuple[Ints, Ints]:
    return np.broadcast_to(firsts, replicas.shape), replicas


def _possible(firsts: Ints, replicas: Ints, costs: StageCosts) -> tuple[Ints, Ints]:
    """The possible ones among these partitions."""
    columns = _columns(firsts, replicas, costs)
    fine = np.ones(len(firsts), dtype=bool)
    for first, end, each in columns:
        fine &= (first < end) & (each >= 1) & (each <= costs.most_replicas)
    firsts, replicas = firsts[fine], replicas[fine]
    held = np.ones(len(firsts), dtype=bool)
    for number, (first, end, each) in enumerate(_columns(firsts, replicas, costs)):
        held &= costs.fits(first, end, each, firsts.shape[1] - 1 - number)
    return firsts[held], replicas[held]
