"""Times of slices along a schedule, and slices for a schedule that does not run all forwards first.

The slicer's formula is exact for TeraPipe's order. Where backwards start early, as in Seq1F1B, a slow forward on one
rank meets another slice's backward on the next, so slices of unequal time cost more than the formula says. The
candidates are even slices, and the slicer's answers for more ranks, whose longest slices are shorter. They are put into
the schedule and simulated.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from pipeloom import schedules
from pipeloom.common.division import divisors
from pipeloom.errors import InputError, folded
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.plan.slicing.slice_costs import Array, SliceTime, ask
from pipeloom.plan.slicing.slicer import Slicing, check_sizes, slice_batch, stages_of, uniform
from pipeloom.sim import Costs, Span, Timeline, simulate
from pipeloom.sim.simulator import build_timeline

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of even slices
_FACTORS = (1, 2, 4, 8)  # on the ranks of the slicer
_SIMULATED = 8  # candidates per piece size, the best by the formula
_STEADY = 2  # pieces per rank after which each further piece adds the same time


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
    """Equal pieces of a batch with the same cuts: the candidate with the shortest simulated step.

    Args:
        costs: seconds of a rank on one slice, including its message.
        schedule: name of a schedule that supports any number of slices.
        sequence, num_ranks, batch, grid, max_piece, sliced: as for `slice_batch`.
        memory_limit: maximum tokens per rank whose activations are kept, counted along the schedule.

    Returns:
        The slicing, which may not be optimal.

    Raises:
        InputError: as `slice_batch`, or no candidate keeps the memory limit.
    """
    check_sizes(sequence=sequence, num_ranks=num_ranks, batch=batch, grid=grid)
    [costs, *_] = stages_of(costs, num_ranks)
    found: list[Slicing] = []
    least = batch * sequence
    for size in (each for each in divisors(batch) if each <= (max_piece or batch)):
        together, count = _Together(costs, size), batch // size
        tried = {}
        limit = None if memory_limit is None else memory_limit // size
        for lengths in _candidates(together, sequence, num_ranks, count, grid, limit) if sliced else [(sequence,)]:
            tokens = size * peak_along(_build(schedule, num_ranks, count, len(lengths)), lengths)
            least = min(least, tokens)
            if memory_limit is None or tokens <= memory_limit:
                tried[lengths] = tokens, _times(together, lengths)
        by_formula = [
            (float(count * times.sum() + (num_ranks - 1) * times.max(axis=1).sum()), lengths)
            for lengths, (_, times) in tried.items()
        ]
        few = min(count, _STEADY * num_ranks)
        for _, lengths in sorted(by_formula)[:_SIMULATED]:
            tokens, times = tried[lengths]
            step = _simulated(_build(schedule, num_ranks, few, len(lengths)), times, schedule).makespan
            found.append(
                Slicing(
                    num_ranks=num_ranks,
                    batch=(size,) * count,
                    slices=(lengths,) * count,
                    predicted_seconds=step + (count - few) * float(times.sum()),
                    max_slice_seconds=float(times.max(axis=1).sum()),
                    gap_seconds=math.inf,
                    peak_tokens=tokens,
                )
            )
    best = min(found, key=lambda each: each.predicted_seconds, default=None)
    if best is None:
        raise InputError(
            f"memory_limit={memory_limit}: the slices tried for {schedule} hold at least {least} tokens per rank. "
            f"Raise memory_limit to {least}."
        )
    return best


def scheduled_timeline(costs: SliceTime, slicing: Slicing, *, schedule: str, name: str) -> Timeline:
    """The simulated step of a slicing whose pieces are equal.

    Raises:
        InputError: the pieces differ.
    """
    if len({*slicing.slices}) > 1 or len({*slicing.batch}) > 1:
        raise InputError(
            f"batch={folded(slicing.batch)}, slices={folded(slicing.slices)}: schedule {schedule!r} needs the same "
            "number of sequences and the same slice lengths in every micro-batch. Use slice_for_schedule."
        )
    [costs, *_] = stages_of(costs, slicing.num_ranks)
    times = _times(_Together(costs, slicing.batch[0]), slicing.slices[0])
    return _simulated(_build(schedule, slicing.num_ranks, len(slicing.batch), times.shape[1]), times, name)


def peak_along(schedule: Schedule, lengths: Sequence[int]) -> int:
    """Peak tokens of one sequence whose activations a rank holds along a schedule."""
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


def _build(schedule: str, num_ranks: int, count: int, num_slices: int) -> Schedule:
    return schedules.build(schedule, num_ranks=num_ranks, num_microbatches=count, num_slices=num_slices)


def _simulated(built: Schedule, times: Array, name: str) -> Timeline:
    sums = times.sum(axis=1)
    factors = np.divide(times * built.num_slices, sums[:, None], out=np.ones_like(times), where=sums[:, None] > 0)
    forward, backward = factors.tolist()
    costs = Costs.uniform(forward=float(sums[0]), backward=float(sums[1]))
    costs = replace(costs, slice_factors=(tuple(forward), tuple(backward)))
    return replace(simulate(built, costs), name=name)


def slicing_timeline(
    costs: SliceTime | Sequence[SliceTime],
    slices: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    batch: Sequence[int] | None = None,
    name: str = "slices",
) -> Timeline:
    """A step with given slices: each piece of the batch is a micro-batch, and times are exact.

    A micro-batch counts as one activation and a slice as an even part of one.

    Args:
        costs: seconds of a rank on one slice; a list has one entry per rank.
        slices: lengths of the slices of every piece of the batch.
        num_ranks: pipeline-parallel degree.
        batch: sequences per piece (default: 1 each).
        name: of the timeline.
    """
    sizes = [1] * len(slices) if batch is None else list(batch)
    if len(sizes) != len(slices) or not slices or any(not lengths or min(lengths) < 1 for lengths in slices):
        raise InputError(
            f"slices={slices!r}, batch={sizes!r}: each piece needs slices of at least 1 token. Give one list per piece."
        )
    units = [
        (piece, None if len(lengths) == 1 else part)
        for piece, lengths in enumerate(slices)
        for part in range(len(lengths))
    ]
    asked = [
        (size, length, end - length)
        for size, lengths in zip(sizes, slices, strict=True)
        for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]
    known: dict[tuple[int, tuple[int, int, int]], Array] = {}
    seconds = []
    for stage in stages_of(costs, num_ranks):
        for each in asked:
            if (id(stage), each) not in known:
                known[id(stage), each] = ask(stage, *each)
        seconds.append(np.array([known[id(stage), each] for each in asked]).T.tolist())
    forward = _flow([times for times, _ in seconds], [0.0] * num_ranks)
    ended = [row[-1][1] for row in forward]
    backward = _flow([times[::-1] for _, times in seconds[::-1]], ended[::-1])[::-1]
    spans = [
        [Span(Action(rank, Op.F, *unit), *span) for unit, span in zip(units, forward[rank], strict=True)]
        + [Span(Action(rank, Op.B, *unit), *span) for unit, span in zip(units[::-1], backward[rank], strict=True)]
        for rank in range(num_ranks)
    ]
    schedule = Schedule(
        name=name,
        num_microbatches=len(slices),
        num_slices=max(map(len, slices)),
        placement=Placement.loop(num_ranks),
        orders=tuple(tuple(span.action for span in row) for row in spans),
    )
    return build_timeline(schedule, spans, name=name, kind="simulated")


def _flow(seconds: Sequence[Sequence[float]], free: Sequence[float]) -> list[list[tuple[float, float]]]:
    """(start, end) of jobs that pass through the stages in order; each stage runs them in order once it is free."""
    arrive = [-math.inf] * len(seconds[0])
    rows = []
    for stage, times in enumerate(seconds):
        clock, row = free[stage], []
        for ready, time in zip(arrive, times, strict=True):
            start = max(clock, ready)
            clock = start + time
            row.append((start, clock))
        arrive = [end for _, end in row]
        rows.append(row)
    return rows
