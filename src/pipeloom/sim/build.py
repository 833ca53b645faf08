"""Timelines from the spans of a simulated or measured run."""

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

_AT_ONCE = {Op.OFFLOAD: 0, Op.RELOAD: 2}  # at the same time, ends of OFFLOAD come first and starts of RELOAD last


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

    `background` has overlapped transfers and `waits` the seconds that computations waited inside, both per rank.
    `keeps` has, per stage, the bytes of one action from F on, and the bytes that are left after I.
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
    """The timeline of a measured step.

    Args:
        pipeline: the schedule or program that ran.
        records: for each rank, ``(action, start, end)`` in execution order, in seconds of one clock.
        name: the name of the timeline; default: the schedule's.
        waits: for each rank, the seconds that its computations waited inside.

    Time 0 is the first start of a computation or an overlapped transfer on any rank.

    Raises:
        InputError: records of some ranks are missing.
    """
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    if len(records) != schedule.num_ranks:
        raise InputError(
            f"records of {len(records)} ranks: must have one entry for each of {schedule.num_ranks} ranks."
        )
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
    """Change points of live activations: up at the start of F or RELOAD, down at the end of B, W, OFFLOAD."""
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
    """Change points of one rank's bytes: F and RELOAD take all at their start; at their end, I frees all but `left`,
    W frees `left`, and B and OFFLOAD free all.
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
