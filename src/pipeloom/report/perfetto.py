"""Writes a timeline as Chrome trace JSON, for https://ui.perfetto.dev and chrome://tracing.

The trace has one process per rank, with a track of actions, a track per link (all-gathers, gradient reductions,
offloading), a track of collectives inside the stage, a counter of live activations, and an arrow per activation or
gradient sent between ranks.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeloom.common.atomic_file import write_whole
from pipeloom.ir.action import COMPUTE_OPS, RECEIVES, SKIP_OPS, SKIP_SENDS, Action, Op
from pipeloom.ir.schedule import Uses, dependencies
from pipeloom.report.drawing import described
from pipeloom.sim.background import LINKS
from pipeloom.sim.timeline import Span, Timeline

# Reserved colour names of chrome://tracing; Perfetto derives the colour from the name of a slice instead.
_CNAMES = {Op.F: "rail_response", Op.B: "rail_animation", Op.I: "good", Op.W: "rail_idle"}
_CNAMES |= dict.fromkeys(RECEIVES, "grey")


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds, pid = rank."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.spans):
        events += [
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}},
            {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "actions"}},
        ]
        events += [_slice(rank, span, timeline.versions_used) for span in row]
        for track, link in enumerate(timeline.links, 1):  # the background spans, one track per link
            name = {"name": f"{link} link"}
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": name})
            row = [span for span in timeline.background[rank] if LINKS[span.action.op] == link]
            events += [_slice(rank, span, timeline.versions_used) | {"tid": track} for span in row]
        if timeline.collectives:
            events += _collectives(timeline, rank, len(timeline.links) + 1)
        events += [
            {"ph": "C", "name": "live activations", "pid": rank, "ts": _nanoseconds(at) / 1e3, "args": {"live": live}}
            for at, live in timeline.memory[rank]
        ]
    events += _arrows(timeline)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.name,
            "kind": timeline.kind,
            "makespan_seconds": timeline.makespan,
            "bubble_fraction": timeline.bubble_fraction,
        },
    }


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the trace to `path`, compressed if its name ends in ``.gz``."""
    write_whole(path, trace_bytes(timeline, compressed=path.suffix == ".gz"))


def trace_bytes(timeline: Timeline, *, compressed: bool) -> bytes:
    """The trace as the content of a file. The same timeline gives the same bytes."""
    text = json.dumps(trace(timeline), separators=(",", ":")).encode()
    return gzip.compress(text, mtime=0) if compressed else text


def _nanoseconds(seconds: float) -> int:
    """Integer nanoseconds, so that adjacent slices do not overlap by a rounding error."""
    return round(seconds * 1e9)


def _slice(rank: int, span: Span, versions: Uses) -> dict[str, Any]:
    (_, op, microbatch, _), start, end = span
    event: dict[str, Any] = {
        "ph": "X",
        "name": op.value if microbatch is None else f"{op.value} {microbatch}",
        "cat": "compute" if op in COMPUTE_OPS else "other",
        "pid": rank,
        "tid": 0,
        "ts": _nanoseconds(start) / 1e3,
        "dur": (_nanoseconds(end) - _nanoseconds(start)) / 1e3,
        "args": described(span, versions),
    }
    if op in _CNAMES:
        event["cname"] = _CNAMES[op]
    return event


def _collectives(timeline: Timeline, rank: int, track: int) -> Iterator[dict[str, Any]]:
    """The collectives inside the actions of a rank, on a track of their own."""
    place = {"pid": rank, "tid": track}
    yield {"ph": "M", "name": "thread_name", "args": {"name": "collectives inside the stage"}, **place}
    for axis, name, start, end, size in timeline.collectives[rank]:
        at = _nanoseconds(start)
        times = {"ts": at / 1e3, "dur": (_nanoseconds(end) - at) / 1e3}
        yield {"ph": "X", "name": f"{axis} {name}", "cat": "collective", "args": {"bytes": size}, **times, **place}


def _arrows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Start and end of an arrow for each activation or gradient sent between ranks."""
    rows = enumerate(timeline.compute_spans)
    found: dict[Action, tuple[int, Span]] = {span.action: (rank, span) for rank, row in rows for span in row}
    needs = {action: dependencies(action, timeline.schedule) for action in found}
    for rank, row in enumerate(timeline.spans):  # values that skip stages, from their SEND to their RECV
        found |= {span.action: (rank, span) for span in row if span.action.op in SKIP_OPS}
    needs |= {action.other_end(): (action,) for action in found if action.op in SKIP_SENDS}
    number = 0
    for action, (rank, span) in found.items():
        for need in needs.get(action, ()):
            source, producer = found.get(need, (rank, span))
            if source == rank:
                continue
            name = "activation" if action.op in (Op.F, Op.RECV_SKIP) else "gradient"
            common = {"name": name, "cat": "message", "id": number, "tid": 0}
            # The viewer attaches an arrow to the slice around its time stamp. The end of a slice is outside of it, and
            # an empty send or receive may share its start.
            leaves = max(_nanoseconds(producer.start), _nanoseconds(producer.end) - 1)
            arrives = min(_nanoseconds(span.start) + 1, _nanoseconds(span.end))
            yield {"ph": "s", "pid": source, "ts": leaves / 1e3, **common}
            yield {"ph": "f", "bp": "e", "pid": rank, "ts": arrives / 1e3, **common}
            number += 1
