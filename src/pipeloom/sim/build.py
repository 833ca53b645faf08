"""Timelines from the spans of a schedule that was simulated, or that really ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import Literal

from pipeloom.errors import InputError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.schedule import Program, Schedule
from pipeloom.ir.walk import in_background
from pipeloom.sim.events import Transfer
from pipeloom.sim.rows import Span
from pipeloom.sim.timeline import Timeline

_AT_ONCE = {Op.OFFLOAD: 0, Op.RELOAD: 2}  # at one moment first what has left, last what begins to come back


def build_timeline(
    schedule: Schedule,
    spans: Sequence[Sequence[Span]],
    *,
    name: str,
    kind: Literal["simulated", "measured"],
    background: Sequence[Sequence[Span]] = (),
    waits: Sequence[float] = (),
    keeps: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    transfers: tuple[Transfer, ...] = (),
    latency_seconds: float | tuple[tuple[float, ...], ...] = 0.0,
    weight_version_bytes: tuple[float, ...] | None = None,
) -> Timeline:
    """A timeline from the spans of a run of `schedule`; memory and ideal time follow from them.

    `background` is what ran beside them, and `waits` for how long computations waited inside, rank by rank. `keeps`
    are, stage by stage, the bytes of one action that are held from F on, and that are left after I.
    """
    beside = tuple(map(tuple, background)) if any(background) else ()
    both = [(*row, *more) for row, more in zip(spans, beside, strict=True)] if beside else spans
    busy = math.fsum(end - start for row in spans for (_, op, _, _), start, end in row if op in COMPUTE_OPS)
    return Timeline(
        name=name,
        kind=kind,
        spans=tuple(map(tuple, spans)),
        background=beside,
        memory=tuple(_memory(schedule, row) for row in both),
        waits=tuple(waits) if any(waits) else (),
        ideal_seconds=(busy - math.fsum(waits)) / schedule.num_ranks,
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
        memory_bytes=None if keeps is None else tuple(_memory_bytes(schedule, row, *keeps) for row in both),
        overlapped=schedule.overlapped,
        transfers=transfers,
        latency_seconds=latency_seconds,
        weights=schedule.weights,
        microbatches_per_update=schedule.microbatches_per_update,
        weight_version_bytes=weight_version_bytes,
    )


def measured_timeline(
    pipeline: Schedule | Program,
    records: Sequence[Sequence[tuple[Action, float, float]]],
    *,
    name: str | None = None,
    waits: Sequence[float] = (),
) -> Timeline:
    """The timeline of a step that really ran.

    Args:
        pipeline: what ran.
        records: for each rank, ``(action, start, end)`` in the order in which it ran them, in seconds of one clock.
        name: the schedule's unless given.
        waits: for each rank, for how long its computations waited inside.

    Time 0 is the first start of a computation, or of what runs beside one, on any rank; what a rank waited before it is
    cut off.

    Raises:
        InputError: there are not records of every rank.
    """
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    if len(records) != schedule.num_ranks:
        raise InputError(f"records of {len(records)} ranks: {schedule.num_ranks} ranks ran; gather all of them")
    begun = (
        start
        for row in records
        for action, start, _ in row
        if action.op in COMPUTE_OPS or in_background(action, schedule)
    )
    zero = min(begun, default=0.0)
    rows: list[list[Span]] = [[] for _ in records]
    beside: list[list[Span]] = [[] for _ in records]
    for rank, record in enumerate(records):
        for action, start, end in record:
            row = beside[rank] if in_background(action, schedule) else rows[rank]
            row.append(Span(action, max(0.0, start - zero), max(0.0, end - zero)))
    for row in beside:
        row.sort(key=itemgetter(1, 2))
    return build_timeline(schedule, rows, name=name or schedule.name, kind="measured", background=beside, waits=waits)


def _memory(schedule: Schedule, row: Sequence[Span]) -> tuple[tuple[float, float], ...]:
    """Change points of one rank's live activations: up at the start of F, down at the end of B or W.

    What is moved away is there until the end of its OFFLOAD, and from the start of its RELOAD on.
    """
    share = schedule.stage_share / schedule.num_slices
    split = schedule.split_backwards
    changes: list[tuple[float, int, int]] = []
    for (stage, op, microbatch, piece), start, end in row:
        if op is Op.F or op is Op.RELOAD:
            changes.append((start, _AT_ONCE.get(op, 1), 1))
        if (
            op in (Op.W, Op.OFFLOAD)
            or (op is Op.B and (stage, microbatch, piece) not in split)
            or (op is Op.F and schedule.forward_only)
        ):
            changes.append((end, _AT_ONCE.get(op, 1), -1))
    live, points = 0, [(0.0, 0.0)]
    for at, _, change in sorted(changes, key=itemgetter(0, 1)):
        live += change
        points.append((at, live * share))
    return tuple(points)


def _memory_bytes(
    schedule: Schedule, row: Sequence[Span], activation: tuple[float, ...], left: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Change points of one rank's bytes: F takes all at its start, I gives all but `left` back, W or B the rest.

    OFFLOAD gives all back at its end, RELOAD takes it at its start.
    """
    changes: list[tuple[float, int, float]] = []
    for (stage, op, _, _), start, end in row:
        whole = activation[stage]
        if op is Op.F or op is Op.RELOAD:
            changes.append((start, _AT_ONCE.get(op, 1), whole))
        freed = {Op.B: whole, Op.I: whole - left[stage], Op.W: left[stage], Op.OFFLOAD: whole}.get(op, 0.0)
        if op is Op.F and schedule.forward_only:
            freed = whole
        if freed:
            changes.append((end, _AT_ONCE.get(op, 1), -freed))
    held, points = 0.0, [(0.0, 0.0)]
    for at, _, change in sorted(changes, key=itemgetter(0, 1)):
        held += change
        points.append((at, held))
    return tuple(points)
