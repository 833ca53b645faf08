"""`Timeline`: when every action of a step ran and how many activations were alive; simulated or measured."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from pipeloom.errors import InputError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Program, Schedule, dependencies
from pipeloom.ir.text import parse_action


class Span(NamedTuple):
    """One action from `start` to `end`, in seconds since the first computation of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step in time. Simulated and measured runs give this same type.

    Attributes:
        name: the schedule's name.
        kind: where it comes from.
        spans: for each rank, its spans in the order in which it ran them: computations, and where they are known the
            sends, waits for receives and gradient reductions.
        memory: for each rank, ``(seconds, live)`` at every change of the number of live activations, in units of one
            rank-share of one micro-batch (a chunk counts 1/V, a slice 1/K). `live` holds until the next point.
        ideal_seconds: what the step would take without any bubble: the computing of all ranks, evenly shared.
        placement: which ranks hold which stage.
        num_microbatches: micro-batches of the step.
        num_slices: slices of a micro-batch.
        memory_bytes: as `memory`, in bytes, where it is known what a stage keeps; it also falls at the end of an I.
        overlapped: pairs of an F and a backward that ran as one unit (`Schedule.overlapped`).
    """

    name: str
    kind: Literal["simulated", "measured"]
    spans: tuple[tuple[Span, ...], ...]
    memory: tuple[tuple[tuple[float, float], ...], ...]
    ideal_seconds: float
    placement: Placement
    num_microbatches: int
    num_slices: int = 1
    memory_bytes: tuple[tuple[tuple[float, float], ...], ...] | None = None
    overlapped: frozenset[tuple[Action, Action]] = frozenset()

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return self.placement.num_chunks

    @cached_property
    def compute_spans(self) -> tuple[tuple[Span, ...], ...]:
        """`spans` without communication and other actions: F, B, I and W alone."""
        return tuple(tuple(span for span in row if span.action.op in COMPUTE_OPS) for row in self.spans)

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the first computation to the end of the last action on any rank."""
        return max((span.end for row in self.spans for span in row), default=0.0)

    @cached_property
    def span_seconds(self) -> float:
        """Seconds from the first start to the last end of a computation on one rank, for the rank with most."""
        return max((row[-1].end - row[0].start for row in self.compute_spans if row), default=0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds it computes."""
        return tuple(math.fsum(span.end - span.start for span in row) for row in self.compute_spans)

    @property
    def bubble_fraction(self) -> float:
        """Idle time as a fraction of the makespan."""
        return 1 - self.ideal_seconds / self.makespan if self.makespan else 0.0

    @property
    def bubble_fraction_span(self) -> float:
        """Idle time as a fraction of `span_seconds`: what remains if neighbouring steps overlap."""
        return 1 - self.ideal_seconds / self.span_seconds if self.span_seconds else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most activations alive at once, in rank-shares of one micro-batch."""
        return tuple(max((live for _, live in points), default=0.0) for points in self.memory)

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """For each rank, the most bytes of activations and of what waits for a W, where they are known."""
        if self.memory_bytes is None:
            return None
        return tuple(max((held for _, held in points), default=0.0) for points in self.memory_bytes)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that ran, read back from the computations."""
        return Schedule(
            name=self.name,
            num_microbatches=self.num_microbatches,
            num_slices=self.num_slices,
            placement=self.placement,
            orders=tuple(tuple(span.action for span in row) for row in self.compute_spans),
            overlapped=self.overlapped,
            forward_only=all(span.action.op is Op.F for row in self.compute_spans for span in row),
        )

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back exactly."""
        return json.dumps(
            {
                "name": self.name,
                "kind": self.kind,
                "ideal_seconds": self.ideal_seconds,
                "num_microbatches": self.num_microbatches,
                "num_slices": self.num_slices,
                "placement": self.placement.replicas,
                "spans": [[[str(action), start, end] for action, start, end in row] for row in self.spans],
                "memory": self.memory,
                "memory_bytes": self.memory_bytes,
                "overlapped": [[str(first), str(second)] for first, second in sorted(self.overlapped)],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The inverse of `to_json`.

        Raises:
            InputError: the text is no JSON of a timeline.
        """
        try:
            data = json.loads(text)
            return cls(
                name=str(data["name"]),
                kind="measured" if data["kind"] == "measured" else "simulated",
                ideal_seconds=float(data["ideal_seconds"]),
                num_microbatches=int(data["num_microbatches"]),
                num_slices=int(data["num_slices"]),
                placement=Placement(tuple(tuple(map(int, ranks)) for ranks in data["placement"])),
                spans=tuple(
                    tuple(Span(parse_action(action), float(start), float(end)) for action, start, end in row)
                    for row in data["spans"]
                ),
                memory=_curves(data["memory"]),
                memory_bytes=None if data.get("memory_bytes") is None else _curves(data["memory_bytes"]),
                overlapped=frozenset(
                    (parse_action(first), parse_action(second)) for first, second in data.get("overlapped", ())
                ),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"not the JSON of a timeline ({type(error).__name__}: {error}): write it with Timeline.to_json"
            ) from error


def _curves(data: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[tuple[float, float], ...], ...]:
    return tuple(tuple((float(at), float(value)) for at, value in points) for points in data)


def build_timeline(
    schedule: Schedule,
    spans: Sequence[Sequence[Span]],
    *,
    name: str,
    kind: Literal["simulated", "measured"],
    keeps: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Timeline:
    """A timeline from the spans of a run of `schedule`; memory and ideal time follow from them.

    `keeps` are, stage by stage, the bytes of one action that are held from F on, and that are left after I.
    """
    busy = math.fsum(end - start for row in spans for (_, op, _, _), start, end in row if op in COMPUTE_OPS)
    return Timeline(
        name=name,
        kind=kind,
        spans=tuple(map(tuple, spans)),
        memory=tuple(_memory(schedule, row) for row in spans),
        ideal_seconds=busy / schedule.num_ranks,
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
        memory_bytes=None if keeps is None else tuple(_memory_bytes(schedule, row, *keeps) for row in spans),
        overlapped=schedule.overlapped,
    )


def measured_timeline(
    pipeline: Schedule | Program, records: Sequence[Sequence[tuple[Action, float, float]]], *, name: str | None = None
) -> Timeline:
    """The timeline of a step that really ran.

    Args:
        pipeline: what ran.
        records: for each rank, ``(action, start, end)`` in the order in which it ran them, in seconds of one clock.
        name: the schedule's unless given.

    Time 0 is the first start of a computation on any rank; what a rank waited before it is cut off.

    Raises:
        InputError: there are not records of every rank.
    """
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    if len(records) != schedule.num_ranks:
        raise InputError(f"records of {len(records)} ranks: {schedule.num_ranks} ranks ran; gather all of them")
    zero = min((start for row in records for action, start, _ in row if action.op in COMPUTE_OPS), default=0.0)
    spans = [[Span(action, max(0.0, start - zero), max(0.0, end - zero)) for action, start, end in r] for r in records]
    return build_timeline(schedule, spans, name=name or schedule.name, kind="measured")


def critical_path(timeline: Timeline) -> list[tuple[int, Span]]:
    """``(rank, span)`` of the chain of computations that ends last, first to last.

    Each begins when the one before it on the path has ended (and its message, if it crossed ranks, has arrived):
    making any of them shorter is the only way to make the step shorter.
    """
    rows = timeline.compute_spans
    index = {span.action: (rank, position) for rank, row in enumerate(rows) for position, span in enumerate(row)}
    if not index:
        return []
    rank = max((rank for rank, row in enumerate(rows) if row), key=lambda r: rows[r][-1].end)
    position = len(rows[rank]) - 1
    path = []
    while True:
        span = rows[rank][position]
        path.append((rank, span))
        before = [(rank, position - 1)] if position else []
        # A rank that went straight from one computation to the next was itself the reason for the start.
        if not before or rows[rank][position - 1].end < span.start:
            before += [index[need] for need in dependencies(span.action, timeline.schedule) if need in index]
        if not before:
            return path[::-1]
        rank, position = max(before, key=lambda at: rows[at[0]][at[1]].end)


def _memory(schedule: Schedule, row: Sequence[Span]) -> tuple[tuple[float, float], ...]:
    """Change points of one rank's live activations: up at the start of F, down at the end of B or W."""
    share = schedule.stage_share / schedule.num_slices
    live, points, split = 0, [(0.0, 0.0)], schedule.split_backwards
    for (stage, op, microbatch, piece), start, end in row:
        if op is Op.F:
            live += 1
            points.append((start, live * share))
        if (
            op is Op.W
            or (op is Op.B and (stage, microbatch, piece) not in split)
            or (op is Op.F and schedule.forward_only)
        ):
            live -= 1
            points.append((end, live * share))
    return tuple(points)


def _memory_bytes(
    schedule: Schedule, row: Sequence[Span], activation: tuple[float, ...], left: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Change points of one rank's bytes: F takes all at its start, I gives all but `left` back, W or B the rest."""
    held, points = 0.0, [(0.0, 0.0)]
    for (stage, op, _, _), start, end in row:
        if op is Op.F:
            held += activation[stage]
            points.append((start, held))
        freed = {Op.B: activation[stage], Op.I: activation[stage] - left[stage], Op.W: left[stage]}.get(op, 0.0)
        if op is Op.F and schedule.forward_only:
            freed = activation[stage]
        if freed:
            held -= freed
            points.append((end, held))
    return tuple(points)
