"""Slices for a schedule that does not run all forwards first: the few that may be best, timed by the simulator.

The slicer's formula is exact for TeraPipe's order. Where backwards start as early as they can, as in Seq1F1B, a slow
forward on one rank meets another slice's backward on the next, and slices of unequal time cost more than the formula
says. So even slices of several numbers, and what the slicer finds for more ranks than there are, which have shorter
longest slices, are put into the schedule and simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.ir.action import Op
from pipeloom.ir.schedule import Schedule
from pipeloom.plan.slicing.even import uniform
from pipeloom.plan.slicing.slice_costs import Array, SliceTime, ask
from pipeloom.plan.slicing.slicer import Slicing, check_sizes, slice_batch, stages_of
from pipeloom.sim.costs import Costs
from pipeloom.sim.simulator import simulate
from pipeloom.sim.timeline import Timeline

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of even slices
_FACTORS = (1, 2, 4, 8)  # on the ranks of the slicer
_SIMULATED = 8  # of pieces of each size, the best by the formula
_STEADY = 2  # pieces a rank after which every further one adds a rank's work


@dataclass(frozen=True, slots=True)
class _Together:
    """Costs of pieces of `size` sequences, each as one."""

    costs: SliceTime
    size: int

    @property
    def takes_arrays(self) -> bool:
        return getattr(self.costs, "takes_arrays", False)

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Any, Any]:
        return self.costs(batch * self.size, length, context)


def slice_for_schedule(
    costs: SliceTime,
    *,
    schedule: str,
    sequence: int,
    num_ranks: int,
    batch: int = 1,
    grid: int = 8,
    memory_limit: int | None = None,
    max_piece: int | None = None,
    sliced: bool = True,
) -> Slicing:
    """Equal pieces of a batch, all cut alike, with the shortest simulated step of those that are tried.

    Args:
        costs: of a rank on one slice, message included.
        schedule: name of a family that has every number of slices.
        sequence, num_ranks, batch, grid, max_piece, sliced: as `slice_batch` has them.
        memory_limit: most tokens whose activations a rank may hold, counted along the schedule.

    Returns:
        The slicing. How far it is from the best there is, is not known.

    Raises:
        InputError: what `slice_batch` refuses, or a memory limit that nothing that is tried keeps.
    """
    check_sizes(sequence=sequence, num_ranks=num_ranks, batch=batch, grid=grid)
    [costs, *_] = stages_of(costs, num_ranks)
    found: list[Slicing] = []
    least = batch * sequence
    for size in (each for each in range(1, min(batch, max_piece or batch) + 1) if batch % each == 0):
        together, count = _Together(costs, size), batch // size
        tried = {}
        limit = None if memory_limit is None else memory_limit // size
        for lengths in _candidates(together, sequence, num_ranks, count, grid, limit) if sliced else [(sequence,)]:
            tokens = size * peak_along(_build(schedule, num_ranks, count, len(lengths)), lengths)
            least = min(least, tokens)
            if memory_limit is None or tokens <= memory_limit:
                tried[lengths] = tokens, _times(together, lengths)
        by_formula = [(_formula(times, count, num_ranks), lengths) for lengths, (_, times) in tried.items()]
        for _, lengths in sorted(by_formula)[:_SIMULATED]:
            tokens, times = tried[lengths]
            found.append(
                Slicing(
                    num_ranks=num_ranks,
                    batch=(size,) * count,
                    slices=(lengths,) * count,
                    predicted_seconds=_step_seconds(schedule, times, count, num_ranks),
                    max_slice_seconds=float(times.max(axis=1).sum()),
                    gap_seconds=math.inf,
                    peak_tokens=tokens,
                )
            )
    best = min(found, key=lambda each: each.predicted_seconds, default=None)
    if best is None:
        raise InputError(
            f"a memory limit of {memory_limit} tokens: of the slices that are tried, those of {schedule} hold at least "
            f"{least} tokens on a rank; allow {least}"
        )
    return best


def scheduled_timeline(costs: SliceTime, slicing: Slicing, *, schedule: str, name: str) -> Timeline:
    """The simulated step of a slicing whose pieces are all alike.

    Raises:
        InputError: they are not.
    """
    if len({*slicing.slices}) > 1 or len({*slicing.batch}) > 1:
        raise InputError(f"pieces of {slicing.batch} sequences, cut differently: a schedule has one cut for all")
    [costs, *_] = stages_of(costs, slicing.num_ranks)
    times = _times(_Together(costs, slicing.batch[0]), slicing.slices[0])
    return _simulated(_build(schedule, slicing.num_ranks, len(slicing.batch), times.shape[1]), times, name)


def peak_along(schedule: Schedule, lengths: Sequence[int]) -> int:
    """Most tokens of one sequence whose activations a rank holds in the order of a schedule."""
    signs = {Op.F: 1, Op.B: -1}
    return max(
        max(accumulate(signs[action.op] * lengths[action.slice or 0] for action in order)) for order in schedule.orders
    )


def _candidates(
    costs: SliceTime, sequence: int, num_ranks: int, count: int, grid: int, memory_limit: int | None
) -> list[tuple[int, ...]]:
    cells = -(-sequence // grid)
    even = [uniform(sequence=sequence, num_slices=each, multiple=grid) for each in _COUNTS if each <= cells]

    def best(ranks: int, limit: int | None = None) -> tuple[int, ...]:
        found = slice_batch(
            costs, sequence=sequence, num_ranks=ranks, batch=count, grid=grid, memory_limit=limit, max_piece=1
        )
        return found.slices[0]

    found = [best(factor * num_ranks) for factor in _FACTORS]
    if memory_limit is not None:
        with suppress(InputError):  # nothing within the limit
            found.append(best(num_ranks, memory_limit))
    return list(dict.fromkeys([*even, *found]))


def _times(costs: SliceTime, lengths: Sequence[int]) -> Array:
    """Seconds of forward and backward of every slice, shape (2, slices)."""
    starts = accumulate(lengths[:-1], initial=0)
    return np.array([ask(costs, 1, *unit) for unit in zip(lengths, starts, strict=True)]).T


def _formula(times: Array, count: int, num_ranks: int) -> float:
    return float(count * times.sum() + (num_ranks - 1) * times.max(axis=1).sum())


def _step_seconds(schedule: str, times: Array, count: int, num_ranks: int) -> float:
    few = min(count, _STEADY * num_ranks)
    timeline = _simulated(_build(schedule, num_ranks, few, times.shape[1]), times, schedule)
    return timeline.makespan + (count - few) * float(times.sum())


def _build(schedule: str, num_ranks: int, count: int, num_slices: int) -> Schedule:
    return schedules.build(schedule, num_ranks=num_ranks, num_microbatches=count, num_slices=num_slices)


def _simulated(built: Schedule, times: Array, name: str) -> Timeline:
    sums = times.sum(axis=1)
    factors = np.divide(times * built.num_slices, sums[:, None], out=np.ones_like(times), where=sums[:, None] > 0)
    forward, backward = (float(each) for each in sums)
    costs = Costs(
        forward=forward,
        backward_input=backward / 2,
        backward_weight=backward / 2,
        slice_factors=tuple(tuple(map(float, each)) for each in factors),  # type: ignore[arg-type]
    )
    return replace(simulate(built, costs), name=name)
