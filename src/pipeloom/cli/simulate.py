"""`pipeloom simulate`: predicted makespan, bubble and memory of a schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeloom import schedules
from pipeloom.cli import simulate_data
from pipeloom.cli.common.files import write_text
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.simulate_inputs import Inputs
from pipeloom.common.atomic_file import write_whole
from pipeloom.common.quantities import seconds_text
from pipeloom.errors import InputError
from pipeloom.ir import Checked, Schedule, check
from pipeloom.ir.torch_csv import to_csv
from pipeloom.sim import Timeline, simulate

_COMPARE = "compare"
_OUTPUTS = ("csv", "html", "svg", "trace")
_FILES = (*_OUTPUTS, "out")

_EXAMPLES = """\
pipeloom simulate 1f1b --ranks 4 --microbatches 8
pipeloom simulate gpipe --ranks 8 --microbatches 32 --forward 1 --backward-input 1.2 --backward-weight 0.8
pipeloom simulate 1f1b --ranks 4 --microbatches 16 --latency 0.1 --json
pipeloom simulate 1f1b --ranks 4 --microbatches 8 --html 1f1b.html --svg 1f1b.svg --trace 1f1b.json.gz
pipeloom simulate zb-auto --ranks 8 --microbatches 24 --memory-limit 12 --weight-gradient-memory 0.4
pipeloom simulate mine.py:eager --ranks 4 --microbatches 8
pipeloom simulate search --ranks 4 --microbatches 16 --costs costs.json --out plan.json
pipeloom simulate seq1f1b --ranks 4 --microbatches 1 --slices 8
pipeloom simulate pipedream --ranks 4 --microbatches 16 --replicas 2,1,1 --weights vertical
pipeloom simulate bfs --ranks 2 --microbatches 4 --data 4 --data-strategy zero3 --data-granularity chunk
pipeloom simulate 1f1b --ranks 4 --microbatches 8 --offload 3
pipeloom simulate compare 1f1b pipedream pipedream-2bw --ranks 4 --microbatches 32
pipeloom simulate compare 1f1b zb-h1 --ranks 4 --microbatches 8 --slow-rank 2:1.5
pipeloom simulate compare 1f1b interleaved zb-h1 zb-v --ranks 4 --microbatches 8
"""


def main(argv: Sequence[str]) -> int:
    """Simulate one schedule, or compare several, and show them; returns the exit code."""
    options = _parser().parse_args(list(argv))
    simulate_data.check_options(options)
    names = _names(options)
    inputs = Inputs.read(options)
    made = [_simulate(name, inputs) for name in names]
    timelines = [timeline for timeline, _, _ in made]
    written = _write_files(timelines, made[0][1], options)
    if options.out is not None:
        write_text("--out", options.out, _plan_json(made[0][1], inputs, made[0][2]) + "\n")
        written.append(options.out)
    answers = [answer for _, _, answer in made]
    if options.json:
        print(json.dumps({"schedules": answers} if options.names[0] == _COMPARE else answers[0], allow_nan=False))
        return 0
    from pipeloom.report.terminal import print_comparison, print_timeline

    if options.names[0] == _COMPARE:
        print_comparison(timelines)
    else:
        print_timeline(timelines[0])
    for answer in answers:
        _print_notes(answer)
    for path in written:
        print(f"wrote {path}")
    return 0


def _names(options: Any) -> list[str]:
    """The names of the schedules, validated.

    Raises:
        InputError: no schedule to compare, several without `compare`, or wrong output files.
    """
    names: list[str] = options.names
    if names[0] == _COMPARE:
        names = names[1:]
        if not names:
            raise InputError(
                "simulate compare: needs at least one schedule. Name the schedules to compare, such as 1f1b zb-h1."
            )
        if options.trace or options.csv or options.out:
            raise InputError(
                "simulate compare: --trace, --csv and --out write one schedule. Remove compare, or the option."
            )
    elif len(names) > 1:
        raise InputError(
            f"argument {names[1]!r}: simulate takes one schedule. For several, run `pipeloom simulate compare "
            f"{' '.join(names)}`."
        )
    if options.trace is not None and not options.trace.endswith((".json", ".json.gz")):
        raise InputError(f"--trace {options.trace}: the file name must end in .json or .json.gz.")
    outputs = [path for path in map(vars(options).get, _FILES) if path and not path.startswith("/dev/")]
    if twice := next((path for path in outputs if outputs.count(path) > 1), None):
        raise InputError(f"{twice} is named twice: the second file would overwrite the first. Use two names.")
    for name in names:
        if not schedules.is_file(name):
            schedules.find(name)
    return list(dict.fromkeys(names))


def _simulate(name: str, inputs: Inputs) -> tuple[Timeline, Schedule, dict[str, Any]]:
    """The timeline, the schedule and the numbers."""
    schedule, found = inputs.schedule(name)
    checked = check(schedule)
    pipeline = simulate_data.program_of(schedule, inputs.options)
    costs = simulate_data.costs_of(schedule, inputs.costs, inputs.options)
    timeline = simulate(pipeline, costs, simulate_data.network_of(inputs.network, inputs.options))
    answer = summary(timeline, checked) | inputs.memory(schedule, timeline)
    answer |= simulate_data.numbers(pipeline, timeline)
    if schedule.forward_only:
        answer["forward_only"] = True
    if found is not None:
        best = found.best_named
        answer["best_named"] = None if best is None else {"name": best[0], "makespan_seconds": best[1]}
        answer["lower_bound_seconds"] = found.lower_bound
    return timeline, schedule, answer


def _plan_json(schedule: Schedule, inputs: Inputs, answer: dict[str, Any]) -> str:
    """The simulated schedule as a plan.

    A schedule that was built for the given costs, or read from a file, is stored with its orders; others by name. The
    numbers of the simulation are predictions if the costs come from a file.

    Raises:
        InputError: a stream, an evaluation, or offloaded activations without a target.
    """
    from pipeloom.plan.plan import Plan

    options, name, measured = inputs.options, inputs.options.names[0], inputs.file is not None
    if schedule.microbatches_per_update is not None or schedule.forward_only:
        kind = "an evaluation" if schedule.forward_only else "a stream"
        raise InputError(f"--out={options.out}: schedule {name!r} is {kind}. `pipeloom partition --out` plans streams.")
    if options.offload is not None:
        raise InputError(f"--out={options.out}: --offload has no offload target. Remove --offload, and add it by hand.")
    named = name in schedules.FAMILIES and not schedules.find(name).to_measure
    why = [f"The simulated bubble is {100 * answer['bubble_fraction']:.1f} % of the step."]
    if best := answer.get("best_named"):
        why.append(f"The fastest named schedule, {best['name']}, takes {seconds_text(best['makespan_seconds'])}.")
    if "lower_bound_seconds" in answer:
        why.append(f"No schedule takes less than {seconds_text(answer['lower_bound_seconds'])}.")
    return Plan(
        schedule=name if named else schedule,
        pipeline=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        data=1 if options.data is None else options.data,
        virtual_stages=schedule.placement.num_chunks,
        slices=schedule.num_slices if schedule.num_slices > 1 else None,
        data_strategy=options.data_strategy,
        data_granularity=options.data_granularity,
        predicted_step_seconds=answer["makespan_seconds"] if measured else None,
        predicted_memory_bytes=tuple(answer["peak_bytes"]) if measured and "peak_bytes" in answer else None,
        why=tuple(why) if measured else (),
    ).to_json()


def _print_notes(answer: dict[str, Any]) -> None:
    """Print the numbers that the tables leave out: memory per rank, links, and the bound of the search."""
    name = answer["schedule"]
    if answer.get("forward_only"):
        print(f"{name}: forwards only, as in evaluation")
    peaks = answer.get("peak_bytes") or answer.get("peak_memory")
    if peaks:
        unit = "bytes" if "peak_bytes" in answer else "rank-shares of one micro-batch"
        over = "" if answer.get("within_memory", True) else ": over the limit"
        print(f"{name}: peak memory per rank {' '.join(f'{peak:.6g}' for peak in peaks)} {unit}{over}")
    for line in simulate_data.notes(name, answer, answer["makespan_seconds"]):
        print(line)
    if "weight_version_bytes" in answer and "data" not in answer:
        held = " ".join(f"{size:.6g}" for size in answer["weight_version_bytes"])
        print(f"{name}: peak of all parameter versions per rank {held} bytes")
    if "lower_bound_seconds" in answer:
        best = answer["best_named"]
        said = (
            "no named schedule keeps the limits"
            if best is None
            else (f"the best named schedule is {best['name']} with {best['makespan_seconds']:.6g} s")
        )
        print(f"{name}: {answer['makespan_seconds']:.6g} s; {said}; lower bound {answer['lower_bound_seconds']:.6g} s")


def summary(timeline: Timeline, checked: Checked) -> dict[str, Any]:
    """The numbers of ``--json``."""
    answer: dict[str, Any] = {
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
        "period_seconds": timeline.period_seconds,
        "ideal_period_seconds": timeline.ideal_period_seconds,
        "weight_versions": list(checked.weight_versions),
    }
    if timeline.weight_version_bytes is not None:
        answer["weight_version_bytes"] = list(timeline.weight_version_bytes)
    return answer


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom simulate",
        description="Simulate a schedule, or compare several. Times are seconds per rank and micro-batch. With V\n"
        "virtual stages per rank each stage takes 1/V of the time, and with K slices each slice takes 1/K. A full\n"
        "backward takes backward-input + backward-weight.",
        examples=_EXAMPLES,
    )
    names = ", ".join(schedules.FAMILIES)
    parser.add_argument(
        "names",
        type=str,
        nargs="+",
        help=f"schedule, or `compare` and several: {names}; or a file: .csv, .json, .py:function",
    )
    option = parser.add_argument
    option("--ranks", type=int, required=True, help="pipeline-parallel degree")
    option("--microbatches", type=int, required=True, help="micro-batches per step, or of a stream")
    option("--chunks", type=int, help="virtual stages (chunks) per rank (the schedule's own number)")
    option("--slices", type=int, default=1, help="slices per sequence (1)")
    option("--weights", type=str, help="weight versions of pipedream: stash or vertical (stash)")
    option("--replicas", type=str, help="streams: ranks per stage, such as 2,1,1 (1 each)")
    option("--microbatches-per-update", type=int, help="streams: micro-batches per update of a stage")
    option("--in-flight", type=str, help="streams: in-flight micro-batches: noam, full, or a number (noam)")
    option("--forward", type=float, help="seconds per forward (1)")
    option("--backward-input", type=float, help="seconds per backward of the inputs (1)")
    option("--backward-weight", type=float, help="seconds per backward of the weights (1)")
    option("--overlap", type=float, default=1.0, help="time of an overlapped F and B, as a fraction of their sum (1)")
    option("--latency", type=float, help="latency of a message between two ranks in seconds (0)")
    option("--costs", type=str, help="JSON file with times and sizes per stage, instead of the options")
    option("--slow-rank", type=str, action="append", help="RANK:FACTOR, slowdown of a rank's computations; repeatable")
    option("--memory-limit", type=float, help="memory cap per rank, in activations of one rank and micro-batch")
    option("--weight-gradient-memory", type=float, help="fraction of an activation kept between I and W (1)")
    option("--placement", choices=("loop", "v"), help="search: placement of virtual stages (loop)")
    option("--effort", type=float, help="search: effort, about seconds; the result is reproducible (6)")
    option("--prove", type=float, help="search: seconds for CP-SAT to prove a better bound (none)")
    simulate_data.add_options(parser)
    option("--json", action="store_true", help="output as one JSON object")
    option("--out", type=str, help="plan file to write, for `pipeloom train --plan`")
    option("--csv", type=str, help="CSV file to write, in the format of torch.distributed.pipelining")
    option("--html", type=str, help="HTML file to write, with timeline and numbers")
    option("--svg", type=str, help="SVG file to write, with the timeline")
    option("--critical-path", action="store_true", help="critical path highlighted in --svg and --html")
    option("--trace", type=str, help="trace to write for https://ui.perfetto.dev, .json or .json.gz")
    return parser


def _write_files(timelines: list[Timeline], schedule: Schedule, options: Any) -> list[str]:
    """Write the output files of `options`; returns their paths.

    Raises:
        InputError: a file cannot be written.
    """
    written = []
    for kind in _OUTPUTS:
        path = getattr(options, kind)
        if path is None:
            continue
        try:
            _write(kind, timelines, schedule, Path(path), options.critical_path)
        except OSError as error:
            raise InputError(f"--{kind} {path}: {error.strerror or error}. Use a writable path.") from error
        written.append(path)
    return written


def _write(kind: str, timelines: list[Timeline], schedule: Schedule, path: Path, critical: bool) -> None:
    if kind == "csv":
        write_whole(path, to_csv(schedule))
    elif kind == "trace":
        from pipeloom.report.perfetto import write_trace

        write_trace(timelines[0], path)
    elif kind == "svg":
        from pipeloom.report.svg import timeline_svg

        write_whole(path, timeline_svg(timelines, standalone=True, critical=critical) + "\n")
    else:
        from pipeloom.report.html import simulation_html

        write_whole(path, simulation_html(timelines, critical=critical))
