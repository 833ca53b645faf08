"""`pipeloom simulate`: what a schedule comes to, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom import schedules
from pipeloom.cli.parser import Parser
from pipeloom.errors import InputError
from pipeloom.ir import Checked, check
from pipeloom.sim import Costs, Network, Timeline, simulate

_MOST_ACTIONS = 5_000_000  # beyond it, a simulation takes minutes and gigabytes


def main(argv: Sequence[str]) -> int:
    """Simulate one schedule and show it; returns the exit code."""
    options = _parser().parse_args(list(argv))
    ranks, microbatches = options.ranks, options.microbatches
    chunks = schedules.find(options.name).default_chunks if options.chunks is None else options.chunks
    if min(ranks, microbatches, chunks) > 0 and 2 * ranks * microbatches * chunks > _MOST_ACTIONS:
        raise InputError(
            f"{ranks} ranks x {microbatches} micro-batches x {chunks} chunks: more than {_MOST_ACTIONS:,} actions are "
            "not simulated; the bubble and peak follow the closed forms of `pipeloom schedules`: ask for fewer"
        )
    costs = Costs.uniform(
        forward=options.forward, backward_input=options.backward_input, backward_weight=options.backward_weight
    )
    network = Network(latency_seconds=options.latency)
    schedule = schedules.build(options.name, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks)
    checked = check(schedule)
    timeline = simulate(schedule, costs, network)
    written = _write_files(timeline, options)
    if options.json:
        print(json.dumps(summary(timeline, checked)))
        return 0
    from pipeloom.report.terminal import print_timeline

    print_timeline(timeline)
    for path in written:
        print(f"wrote {path}")
    return 0


def summary(timeline: Timeline, checked: Checked) -> dict[str, Any]:
    """The numbers that scripts read."""
    return {
        "schedule": timeline.name,
        "ranks": timeline.num_ranks,
        "microbatches": timeline.num_microbatches,
        "chunks": timeline.num_chunks,
        "slices": timeline.num_slices,
        "makespan_seconds": timeline.makespan,
        "span_seconds": timeline.span_seconds,
        "ideal_seconds": timeline.ideal_seconds,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fraction_span": timeline.bubble_fraction_span,
        "peak_activations": list(timeline.peak_activations),
        "weight_versions": list(checked.weight_versions),
    }


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom simulate",
        description="Simulate a schedule. Times are seconds of one rank's whole share of the model for one\n"
        "micro-batch: a chunk takes 1/V of them. A full backward takes backward-input + backward-weight.",
        examples="""
            pipeloom simulate 1f1b --ranks 4 --microbatches 8
            pipeloom simulate gpipe --ranks 8 --microbatches 32 --forward 1 --backward-input 1.2 --backward-weight 0.8
            pipeloom simulate 1f1b --ranks 4 --microbatches 16 --latency 0.1 --json
            pipeloom simulate 1f1b --ranks 4 --microbatches 8 --html 1f1b.html --svg 1f1b.svg --trace 1f1b.json.gz
        """,
    )
    parser.add_argument("name", type=str, help=f"schedule: {', '.join(schedules.FAMILIES)}")
    parser.add_argument("--ranks", type=int, required=True, help="processes, each driving one device")
    parser.add_argument("--microbatches", type=int, required=True, help="micro-batches of one step")
    parser.add_argument("--chunks", type=int, help="stages a rank; the schedule's own number if not given")
    parser.add_argument("--forward", type=float, default=1.0, help="seconds of a forward")
    parser.add_argument("--backward-input", type=float, default=1.0, help="seconds of the backward of the inputs")
    parser.add_argument("--backward-weight", type=float, default=1.0, help="seconds of the backward of the weights")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of a message between two ranks")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object and nothing else")
    parser.add_argument("--html", type=str, help="write the picture and the numbers as one offline page")
    parser.add_argument("--svg", type=str, help="write the picture")
    parser.add_argument("--trace", type=str, help="write a trace for https://ui.perfetto.dev (.json or .json.gz)")
    return parser


def _write_files(timeline: Timeline, options: Any) -> list[str]:
    """Write what `options` ask for; returns the paths.

    Raises:
        InputError: a file cannot be written.
    """
    written = []
    for kind, path in (("html", options.html), ("svg", options.svg), ("trace", options.trace)):
        if path is None:
            continue
        try:
            _write(kind, timeline, Path(path))
        except OSError as error:
            raise InputError(
                f"--{kind} {path}: {error.strerror or error}: the file must be writable; name another path"
            ) from error
        written.append(path)
    return written


def _write(kind: str, timeline: Timeline, path: Path) -> None:
    if kind == "trace":
        from pipeloom.report.perfetto import write_trace

        write_trace(timeline, path)
    elif kind == "svg":
        from pipeloom.report.svg import timeline_svg

        path.write_text(timeline_svg([timeline], standalone=True) + "\n", encoding="utf-8")
    else:
        from pipeloom.report.html import simulation_html

        path.write_text(simulation_html([timeline]), encoding="utf-8")
