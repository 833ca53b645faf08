"""`Timeline`: times and live activations of a simulated or measured step."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import sub
from typing import Any, Literal, Self

from pipeloom.common.field_types import check_fields
from pipeloom.common.json_reader import Entry, load_json
from pipeloom.errors import InputError
from pipeloom.ir import COMPUTE_OPS, Action, Op, Placement, Schedule, WeightPolicy
from pipeloom.ir.schedule import Uses
from pipeloom.ir.text import parse_action
from pipeloom.ir.versions import versions_used, weight_versions
from pipeloom.sim.background import LINKS
from pipeloom.sim.events import Transfer
from pipeloom.sim.spans import Collective, Curve, Point, SpanRow
from pipeloom.sim.spans import Span as Span  # re-exported with Timeline
from pipeloom.sim.steady_state import steady_period


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The timeline of one simulated or measured step.

    Attributes:
        name: the schedule's name.
        kind: "simulated" or "measured".
        spans: for each rank, its spans in execution order: computations, and if known sends, waits for receives and
            gradient reductions.
        background: for each rank, transfers that overlap with them (`pipeloom.sim.background`); empty if none.
        waits: for each rank, the seconds that its computations waited inside for these transfers; empty if none.
        memory: for each rank, ``(seconds, live)`` at every change of the number of live activations, in units of one
            rank-share of one micro-batch (a chunk counts 1/V, a slice 1/K). `live` holds until the next point.
        ideal_seconds: seconds of the step without a bubble: the mean compute time per rank.
        placement: which ranks hold which stage.
        num_microbatches: micro-batches of the step.
        num_slices: slices of a micro-batch.
        memory_bytes: `memory` in bytes, if known; it also drops at the end of an I.
        overlapped: pairs of an F and a B or I that ran as one unit.
        transfers: messages over links with a bandwidth, in order of their starts.
        latency_seconds: latency of messages in addition to their transfer; ignored by ``==``.
        weights: which version of the parameters a micro-batch used.
        microbatches_per_update: for a stream that updated parameters while it ran; else None.
        weight_version_bytes: for each rank, peak bytes of parameters in all versions, if known; not part of
            `peak_bytes`.
        collectives: for each rank, what the processes that share its stages exchanged inside its actions, in order of
            starts; empty if none.

    Spans and curves are tuples, or array-backed sequences for large schedules.
    """

    # in the order of the JSON
    name: str
    kind: Literal["simulated", "measured"]
    ideal_seconds: float
    num_microbatches: int
    num_slices: int = 1
    placement: Placement
    spans: tuple[Sequence[Span], ...]
    background: tuple[Sequence[Span], ...] = ()
    waits: tuple[float, ...] = ()
    memory: tuple[Sequence[Point], ...]
    memory_bytes: tuple[Sequence[Point], ...] | None = None
    overlapped: frozenset[tuple[Action, Action]] = frozenset()
    transfers: tuple[Transfer, ...] = ()
    latency_seconds: float | tuple[tuple[float, ...], ...] = field(default=0.0, compare=False)
    weights: WeightPolicy = WeightPolicy.FLUSH
    microbatches_per_update: int | None = None
    weight_version_bytes: tuple[float, ...] | None = None
    collectives: tuple[Sequence[Collective], ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.spans)

    @cached_property
    def links(self) -> tuple[str, ...]:
        """The links in use: "data" to other data-parallel replicas, "memory" to the offload target."""
        used = {LINKS[span.action.op] for row in self.background for span in row if span.end > span.start}
        return tuple(sorted(used))

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return self.placement.num_chunks

    @cached_property
    def compute_spans(self) -> tuple[Sequence[Span], ...]:
        """`spans` of F, B, I and W only."""
        return tuple(
            row if isinstance(row, SpanRow) else tuple(span for span in row if span.action.op in COMPUTE_OPS)
            for row in self.spans
        )

    @cached_property
    def makespan(self) -> float:
        """Seconds from the start of the first computation to the end of the last action on any rank."""
        return max(map(_last_end, (*self.spans, *self.background)), default=0.0)

    @cached_property
    def span_seconds(self) -> float:
        """Seconds from the first start to the last end of a computation on one rank; the maximum over ranks."""
        return max((row[-1].end - row[0].start for row in self.compute_spans if row), default=0.0)

    @cached_property
    def busy_seconds(self) -> tuple[float, ...]:
        """For each rank, the seconds it computes."""
        rows = self.compute_spans
        spans = (row.busy if isinstance(row, SpanRow) else math.fsum(end - at for _, at, end in row) for row in rows)
        return tuple(map(sub, spans, self.waits)) if self.waits else tuple(spans)

    @property
    def is_stream(self) -> bool:
        """Whether parameters are updated during the run; its bubble then includes warm-up and cool-down."""
        return self.microbatches_per_update is not None

    @cached_property
    def period_seconds(self) -> float | None:
        """Seconds per micro-batch in steady state.

        For a stream, see `steady_period`; None if it is too short. For consecutive steps, the makespan divided
        by the number of micro-batches.
        """
        if self.is_stream:
            return steady_period(self.schedule, self.compute_spans)
        return self.makespan / self.num_microbatches

    @property
    def ideal_period_seconds(self) -> float:
        """Seconds per micro-batch if the busiest rank never idled: ``max_s (F_s + B_s) / r_s``."""
        return max(self.busy_seconds, default=0.0) / self.num_microbatches

    @property
    def bubble_fraction(self) -> float:
        """Idle time as a fraction of the makespan."""
        return 1 - self.ideal_seconds / self.makespan if self.makespan else 0.0

    @property
    def bubble_fraction_span(self) -> float:
        """Idle time as a fraction of `span_seconds`: what remains if neighbouring steps overlap."""
        return 1 - self.ideal_seconds / self.span_seconds if self.span_seconds else 0.0

    @cached_property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the peak of live activations, in rank-shares of one micro-batch."""
        return tuple(map(_peak, self.memory))

    @property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """For each rank, peak bytes of activations, including those kept for W; None if unknown."""
        return None if self.memory_bytes is None else tuple(map(_peak, self.memory_bytes))

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that ran, read back from the computations."""
        rows = self.compute_spans
        orders = tuple(row.actions if isinstance(row, SpanRow) else tuple(span.action for span in row) for row in rows)
        return Schedule(
            name=self.name,
            orders=orders,
            forward_only=all(action.op is Op.F for order in orders for action in order),
            **of_schedule(self),
        )

    @cached_property
    def versions_used(self) -> Uses:
        """For a complete stream, the parameter version of each stage and micro-batch; else empty."""
        whole = 2 * self.placement.num_stages * self.num_microbatches <= sum(map(len, self.compute_spans))
        return versions_used(self.schedule) if self.is_stream and whole else {}

    @cached_property
    def weight_versions(self) -> tuple[int, ...]:
        """For each rank, the peak number of versions of its parameters."""
        return weight_versions(self.schedule) if self.versions_used else (1,) * self.num_ranks

    def to_json(self) -> str:
        """One JSON object; `from_json` reads it back exactly."""
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        data["placement"] = self.placement.replicas
        data["spans"], data["background"] = _rows(self.spans), _rows(self.background)
        data["memory"] = [*map(list, self.memory)]
        data["memory_bytes"] = None if self.memory_bytes is None else [*map(list, self.memory_bytes)]
        data["overlapped"] = sorted([str(first), str(second)] for first, second in self.overlapped)
        data["transfers"] = [[str(action), *rest] for action, *rest in self.transfers]
        if not self.collectives:
            del data["collectives"]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            InputError: the text is not the JSON of a timeline.
        """
        try:
            data = load_json(text)
            timeline = cls(
                name=str(data["name"]),
                kind="measured" if data["kind"] == "measured" else "simulated",
                ideal_seconds=Entry(data["ideal_seconds"], "the timeline", "ideal_seconds").number(),
                num_microbatches=Entry(data["num_microbatches"], "the timeline", "num_microbatches").whole(),
                num_slices=Entry(data["num_slices"], "the timeline", "num_slices").whole(),
                placement=Placement(tuple(tuple(map(int, ranks)) for ranks in data["placement"])),
                spans=_spans(data["spans"]),
                background=_spans(data.get("background", ())),
                waits=tuple(map(float, data.get("waits", ()))),
                memory=_curves(data["memory"]),
                memory_bytes=None if data.get("memory_bytes") is None else _curves(data["memory_bytes"]),
                overlapped=frozenset((parse_action(a), parse_action(b)) for a, b in data.get("overlapped", ())),
                transfers=tuple(Transfer(parse_action(text), *rest) for text, *rest in data.get("transfers", ())),
                latency_seconds=_latency(data.get("latency_seconds", 0.0)),
                weights=WeightPolicy(data.get("weights", WeightPolicy.FLUSH)),
                microbatches_per_update=data.get("microbatches_per_update"),
                weight_version_bytes=None if (sizes := data.get("weight_version_bytes")) is None else tuple(sizes),
                collectives=tuple(tuple(Collective(*each) for each in row) for row in data.get("collectives", ())),
            )
            timeline._check()
            return timeline
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise InputError(
                f"not the JSON of a timeline ({type(error).__name__}: {error}). Write it with Timeline.to_json."
            ) from error

    def _check(self) -> None:
        """Raises ValueError where parts of a timeline that was read do not fit each other."""
        check_fields(self)
        ranks, stages = self.num_ranks, self.placement.num_stages
        if self.placement.num_ranks != ranks:
            raise ValueError(f"placement has {self.placement.num_ranks} ranks, and spans have {ranks}")
        rows = {"memory": self.memory, "background": self.background, "waits": self.waits}
        rows |= {"memory_bytes": self.memory_bytes or (), "collectives": self.collectives}
        for name, given in rows.items():
            if len(given) != ranks and (given or name == "memory"):
                raise ValueError(f"{name} must have a row for each of the {ranks} ranks")
        if any(not 0 <= span.action.stage < stages for row in (*self.spans, *self.background) for span in row):
            raise ValueError(f"spans must be of the {stages} stages")
        if any(not {each.source, each.target} <= {*range(ranks)} for each in self.transfers):
            raise ValueError(f"transfers must be between the {ranks} ranks")
        numbers = [*self.waits, *(self.weight_version_bytes or ())]
        numbers += [time for each in self.transfers for time in (each.ready, each.start, each.end)]
        numbers += [number for row in self.collectives for each in row for number in each[2:]]
        if not math.isfinite(math.fsum(numbers)):
            raise ValueError("times must be finite")
        if self.is_stream:
            _ = self.weight_versions, self.period_seconds  # which need a legal schedule


def of_schedule(found: Schedule | Timeline) -> dict[str, Any]:
    """The attributes that a schedule and its timeline share, beside the name."""
    names = ("placement", "num_microbatches", "num_slices", "overlapped", "weights", "microbatches_per_update")
    return {name: getattr(found, name) for name in names}


def _rows(rows: Sequence[Sequence[Span]]) -> list[list[list[str | float]]]:
    return [[[str(action), start, end] for action, start, end in row] for row in rows]


def _spans(data: Sequence[Sequence[Sequence[str | float]]]) -> tuple[tuple[Span, ...], ...]:
    rows = tuple(
        tuple(Span(parse_action(str(action)), float(start), float(end)) for action, start, end in row) for row in data
    )
    if not math.isfinite(sum(start + end for row in rows for _, start, end in row)):
        raise ValueError("times must be finite")
    return rows


def _curves(data: Sequence[Sequence[Sequence[float]]]) -> tuple[tuple[tuple[float, float], ...], ...]:
    curves = tuple(tuple((float(at), float(value)) for at, value in points) for points in data)
    if not math.isfinite(sum(at + value for points in curves for at, value in points)):
        raise ValueError("times must be finite")
    return curves


def _latency(data: float | Sequence[Sequence[float]]) -> float | tuple[tuple[float, ...], ...]:
    return float(data) if isinstance(data, int | float) else tuple(tuple(map(float, row)) for row in data)


def _last_end(row: Sequence[Span]) -> float:
    if isinstance(row, SpanRow):
        return float(row.ends.max()) if len(row) else 0.0
    return max((span.end for span in row), default=0.0)


def _peak(points: Sequence[Point]) -> float:
    return points.peak if isinstance(points, Curve) else max((value for _, value in points), default=0.0)
