"""Where the search for a synchronous partition starts: a lower bound of every step, and good partitions.

A step is at least M (F_s + B_s) + AR_s long for every stage s. So a step of T seconds needs at least r_s ranks for the
stage, and all stages together need at least

    needed(T) = min over partitions of the sum of r_s(T)

ranks, by dynamic programming over the cuts. The least T with needed(T) <= ranks is a lower bound. With the cuts of such
partitions, for several T and prices of a second that fills the pipeline, ranks are divided in proportion to the work of
the stages, or somewhat more for later ones: they wait for the earlier ones to fill.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from pipeloom.plan.partition.problem import Array
from pipeloom.plan.partition.stage_costs import StageCosts

Stage = tuple[int, int, int]  # the cuts in front of it and behind it, replicas

_LONGER = np.geomspace(1.0, 4.0, 25)  # T over the lower bound
_PRICES = (0.0, 0.01, 0.1, 0.5, 1.0, 3.0)  # of a second, in ranks of an even stage per second of it
_FEW_CUTS = 300  # with more, a part of these is tried
_LATER = (0.0, 0.25, 0.5, 0.75)  # how much more ranks than in proportion the last stage gets


def replicas_within(costs: StageCosts, seconds: float) -> Array:
    """Replicas that stages need at least for a step of `seconds`, shape (cuts, cuts); infinite if none are enough."""
    work = costs.num_microbatches * _work(costs)
    found = np.ones_like(work)
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(4):  # each of these is a lower bound; reductions take longer over more replicas
            members = found * costs.context
            share = (seconds - 2 * (members - 1) / members * costs.weights / costs.bandwidth) / work
            if costs.samples is None:
                more = np.where(share > 0, np.ceil(1 / share * (1 - 1e-12)), np.inf)
            else:
                largest = np.minimum(np.floor(share * costs.samples * (1 + 1e-12)), costs.samples)
                more = np.where(largest >= 1, np.ceil(costs.samples / largest), np.inf)
            found = np.fmax(found, np.where(work > 0, more, 1.0))
            found[~np.isfinite(found)] = np.inf
    found[~(costs.cuts.nested & (found <= costs.most_replicas))] = np.inf
    return np.maximum(found, costs.least_replicas(0))


def needed_ranks(replicas: Array) -> Array:
    """Ranks that all layers in front of each cut need at least, shape (cuts + 1,)."""
    return _shortest(replicas)[0]


def least_step_seconds(costs: StageCosts) -> float:
    """A lower bound of the step of every partition; 0 if there is none with these sizes."""
    high = 1e-9
    while needed_ranks(replicas_within(costs, high))[-1] > costs.ranks:
        high *= 2
        if high > 1e120:
            return 0.0
    low = high / 2 if high > 1e-9 else 0.0
    while high - low > 1e-6 * high and high > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if needed_ranks(replicas_within(costs, middle))[-1] <= costs.ranks else (middle, high)
    return low


def first_partitions(
    costs: StageCosts, least: float, judge: Callable[[Sequence[tuple[Any, Any, Any]]], Any], most: int
) -> list[tuple[float, list[Stage]]]:
    """Good partitions with their seconds, best first."""
    work = _work(costs)
    found: dict[tuple[Stage, ...], float] = {}
    even = costs.ranks / max(float(work[0, -1]), 1e-300)
    seen: set[tuple[int, ...]] = set()
    every = 1 if costs.cuts.count <= _FEW_CUTS else 3
    for longer, price in product(_LONGER[::every], _PRICES[::every]):
        if price == _PRICES[0]:
            least_replicas = replicas_within(costs, least * longer)
        rate = price * even * costs.ranks / max(1, costs.cuts.count)
        with np.errstate(invalid="ignore", divide="ignore"):
            replicas = np.maximum(least_replicas, np.sqrt(rate * work))
            cuts = _cuts(replicas + np.where(np.isfinite(replicas), rate * work / replicas, np.inf))
        if cuts is None or tuple(cuts) in seen:
            continue
        seen.add(tuple(cuts))
        for stages in _with_ranks(costs, cuts):
            fits = all(
                costs.fits(first, end, replicas, len(stages) - 1 - number)
                for number, (first, end, replicas) in enumerate(stages)
            )
            if fits:
                found[tuple(stages)] = float(judge(stages))
    ordered = sorted((seconds, list(stages)) for stages, seconds in found.items())
    return ordered[:most]


def _work(costs: StageCosts) -> Array:
    """Seconds of F and B of stages on one rank; infinite for what is no stage."""
    total = costs.forward + costs.backward
    return np.where(costs.cuts.nested, np.maximum(total[None, 1:] - total[:-1, None], 0.0), np.inf)


def _shortest(values: Array) -> tuple[Array, list[int]]:
    """The least sum of values of stages up to each cut, and the cut in front of the last of these stages."""
    count = len(values)
    least, before = np.zeros(count + 1), [0] * (count + 1)
    for end in range(1, count + 1):
        sums = least[:end] + values[:end, end - 1]
        before[end] = int(np.argmin(sums))
        least[end] = sums[before[end]]
    return least, before


def _cuts(values: Array) -> list[int] | None:
    least, before = _shortest(np.where(np.isnan(values), np.inf, values))
    if not math.isfinite(least[-1]):
        return None
    cuts = [len(values)]
    while cuts[-1]:
        cuts.append(before[cuts[-1]])
    return cuts[::-1]


def _with_ranks(costs: StageCosts, cuts: Sequence[int]) -> list[list[Stage]]:
    """All ranks on the stages between these cuts, in proportion to their work or more for later ones."""
    spans, ranks = list(pairwise(cuts)), costs.ranks
    count = len(spans)
    if count > ranks or count * costs.most_replicas < ranks:
        return []
    total = costs.forward + costs.backward
    work = np.array([float(total[end] - total[first]) for first, end in spans])
    found = []
    for later in _LATER:
        wanted = np.maximum(work, 1e-300) / (1 - later * np.arange(count) / max(1, count))
        share = np.clip(wanted / wanted.sum() * ranks, 1, costs.most_replicas)
        replicas = np.floor(share).astype(np.int64)
        while (left := ranks - int(replicas.sum())) != 0:
            step = 1 if left > 0 else -1
            room = replicas < costs.most_replicas if left > 0 else replicas > 1
            order = np.argsort(np.where(room, step * replicas / wanted, np.inf))[: min(abs(left), int(room.sum()))]
            replicas[order] += step
        found.append([(first, end, int(each)) for (first, end), each in zip(spans, replicas, strict=True)])
    return found
