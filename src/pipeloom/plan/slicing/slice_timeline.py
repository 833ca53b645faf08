"""The timeline of slices: all forwards in order, then all backwards in the opposite order, on ranks that may differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from pipeloom.errors import InputError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule
from pipeloom.plan.slicing.slice_costs import SliceTime, ask
from pipeloom.plan.slicing.slicer import stages_of
from pipeloom.sim.simulator import build_timeline
from pipeloom.sim.timeline import Span, Timeline

Starts = list[list[tuple[float, float]]]


def slicing_seconds(
    costs: SliceTime | Sequence[SliceTime],
    slices: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    batch: Sequence[int] | None = None,
) -> float:
    """Exact seconds of a step with given slices; ranks may have different costs.

    Args:
        costs: seconds of a rank on one slice; a list has one entry per rank.
        slices: lengths of the slices of every piece of the batch.
        num_ranks: pipeline-parallel degree.
        batch: sequences per piece (default: 1 each).
    """
    forward, backward = _spans(costs, slices, num_ranks, batch)
    return max(end for row in (*forward, *backward) for _, end in row)


def slicing_timeline(
    costs: SliceTime | Sequence[SliceTime],
    slices: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    batch: Sequence[int] | None = None,
    name: str = "slices",
) -> Timeline:
    """The step of `slicing_seconds` as a timeline: each piece of the batch is a micro-batch.

    A micro-batch counts as one activation and a slice as an even part of one.
    """
    forward, backward = _spans(costs, slices, num_ranks, batch)
    units = [
        (piece, None if len(lengths) == 1 else part)
        for piece, lengths in enumerate(slices)
        for part in range(len(lengths))
    ]
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


def _spans(
    costs: SliceTime | Sequence[SliceTime],
    slices: Sequence[Sequence[int]],
    num_ranks: int,
    batch: Sequence[int] | None,
) -> tuple[Starts, Starts]:
    """Per rank, (start, end) of the forwards in order, and of the backwards from the last to the first."""
    sizes = [1] * len(slices) if batch is None else list(batch)
    if len(sizes) != len(slices) or not slices or any(not lengths or min(lengths) < 1 for lengths in slices):
        raise InputError(
            f"slices={slices!r}, batch={sizes!r}: each piece needs slices of at least 1 token. Give one list per piece."
        )
    units = [
        (size, length, end - length)
        for size, lengths in zip(sizes, slices, strict=True)
        for length, end in zip(lengths, accumulate(lengths), strict=True)
    ]
    known: dict[tuple[int, tuple[int, int, int]], tuple[float, float]] = {}
    seconds = []
    for stage in stages_of(costs, num_ranks):
        for unit in units:
            if (id(stage), unit) not in known:
                known[id(stage), unit] = tuple(map(float, ask(stage, *unit)))  # type: ignore[assignment]
        seconds.append([known[id(stage), unit] for unit in units])
    forward = _flow([[times[0] for times in row] for row in seconds], [0.0] * num_ranks)
    ended = [row[-1][1] for row in forward]
    backward = _flow([[times[1] for times in row[::-1]] for row in seconds[::-1]], ended[::-1])
    return forward, backward[::-1]


def _flow(seconds: Sequence[Sequence[float]], free: Sequence[float]) -> Starts:
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
