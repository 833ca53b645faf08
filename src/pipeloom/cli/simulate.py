"""`pipeloom simulate`: predicted makespan, bubble and memory of a schedule."""

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeloom import schedules
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.simulation.inputs import Inputs
from pipeloom.cli.simulation.lost import lost_answer, print_lost
from pipeloom.cli.simulation.model import add_model_options, print_model
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.quantities import Bytes, BytesPerSecond, bytes_text, percent_text, seconds_text
from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy, Granularity, Program, Schedule, check
from pipeloom.ir.torch_csv import to_csv
from pipeloom.plan.local.saved import notices
from pipeloom.sim import Timeline, simulate
from pipeloom.sim.background import LINKS

_COMPARE = "compare"
_FILES = ("csv", "html", "svg", "trace", "out")

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
pipeloom simulate 1f1b --ranks 4 --microbatches 8 --data 2 --lose 2:1
pipeloom simulate 1f1b --ranks 4 --microbatches 8 --offload 3
pipeloom simulate 1f1b --ranks 16 --microbatches 16 --model llama3-405b --tensor 8 --sequence-parallel --data 128
pipeloom simulate compare 1f1b pipedream pipedream-2bw --ranks 4 --microbatches 32
pipeloom simulate compare 1f1b zb-h1 --ranks 4 --microbatches 8 --slow-rank 2:1.5
pipeloom simulate compare 1f1b interleaved zb-h1 zb-v --ranks 4 --microbatches 8
"""


def main(argv: Sequence[str]) -> int:
    """Simulate one schedule, or compare several, and show them; returns the exit code."""
    options = _parser().parse_args(list(argv))
    names = _names(options)
    check_named({f"--{kind}": getattr(options, kind) for kind in _FILES})
    inputs = Inputs(options)
    made = [_simulate(name, inputs) for name in names]
    answers = [each.answer for each in made]
    written = [(kind, path) for kind in _FILES if (path := getattr(options, kind)) is not None]
    for kind, path in written:
        write_named(f"--{kind}", path, _content(kind, made, inputs))
    if options.json:
        print(json.dumps({"schedules": answers} if options.names[0] == _COMPARE else answers[0], allow_nan=False))
        return 0
    from pipeloom.report.terminal import print_comparison, print_timeline

    if options.names[0] == _COMPARE:
        print_comparison([each.timeline for each in made])
    else:
        print_timeline(made[0].timeline)
    for line in [] if inputs.model is None else notices(inputs.model.cluster):
        print(line)
    for answer in answers:
        _print_notes(answer)
        print_lost(answer)
        if "model" in answer:
            print_model(answer)
    for _, path in written:
        print(f"wrote {path}")
    return 0


class _Simulated(NamedTuple):
    """A timeline, its schedule, and the numbers of ``--json``."""

    timeline: Timeline
    schedule: Schedule
    answer: dict[str, Any]


def _names(options: Any) -> list[str]:
    """The names of the schedules. Raises InputError for a wrong number or name of them, or wrong output files."""
    names: list[str] = options.names
    if names[0] == _COMPARE:
        if not (names := names[1:]):
            rule = "needs at least one schedule. Name the schedules to compare, such as 1f1b zb-h1."
            raise InputError(f"simulate compare: {rule}")
        if options.trace or options.csv or options.out:
            rule = "--trace, --csv and --out write one schedule. Remove compare, or the option."
            raise InputError(f"simulate compare: {rule}")
    elif len(names) > 1:
        fix = f"For several, run `pipeloom simulate compare {' '.join(names)}`."
        raise InputError(f"argument {names[1]!r}: simulate takes one schedule. {fix}")
    if options.trace is not None and not options.trace.endswith((".json", ".json.gz")):
        raise InputError(f"--trace {options.trace}: the file name must end in .json or .json.gz.")
    outputs = [path for path in map(vars(options).get, _FILES) if path and not path.startswith("/dev/")]
    if twice := next((path for path in outputs if outputs.count(path) > 1), None):
        raise InputError(f"{twice} is named twice: the second file would overwrite the first. Use two names.")
    for name in names:
        if not schedules.is_file(name):
            schedules.find(name)
    return list(dict.fromkeys(names))


def _simulate(name: str, inputs: Inputs) -> _Simulated:
    schedule, found = inputs.schedule(name)
    costs, checked, pipeline = inputs.costs_of(schedule), check(schedule), inputs.pipeline(schedule)
    timeline = (
        simulate(pipeline, costs, inputs.network)
        if inputs.model is None
        else inputs.model.timeline(schedule, pipeline, costs, inputs.network)
    )
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
    answer |= inputs.memory(schedule, timeline)
    if isinstance(pipeline, Program) and (data := pipeline.data) is not None:
        degree, strategy, granularity = data.degree, data.strategy.value, data.granularity.value
        answer["data"] = {"degree": degree, "strategy": strategy, "granularity": granularity}
    for link in timeline.links:
        answer[f"{link}_link_seconds"] = [
            math.fsum(end - start for (_, op, _, _), start, end in row if LINKS[op] == link)
            for row in timeline.background
        ]
    if timeline.background and timeline.peak_bytes is not None:
        answer["peak_bytes"] = list(timeline.peak_bytes)
    if inputs.model is not None:
        answer |= inputs.model.answer(schedule, pipeline, timeline)
    if schedule.forward_only:
        answer["forward_only"] = True
    if found is not None:
        best = found.best_named
        answer["best_named"] = None if best is None else {"name": best[0], "makespan_seconds": best[1]}
        answer["lower_bound_seconds"] = found.lower_bound
    return _Simulated(timeline, schedule, answer | lost_answer(name, schedule, inputs))


def _plan_json(made: _Simulated, inputs: Inputs) -> str:
    """The simulated schedule as a plan.

    A schedule that was built for the given costs, or read from a file, is stored with its orders; others by name. The
    numbers of the simulation are predictions if the costs come from a file. Raises InputError if no plan holds it.
    """
    from pipeloom.plan.plan import Plan

    _, schedule, answer = made
    options, name, measured = inputs.options, inputs.options.names[0], inputs.file is not None
    if schedule.microbatches_per_update is not None or schedule.forward_only:
        kind = "an evaluation" if schedule.forward_only else "a stream"
        raise InputError(f"--out={options.out}: schedule {name!r} is {kind}. `pipeloom partition --out` plans streams.")
    if options.offload is not None:
        raise InputError(
            f"--out={options.out}: --offload has no offload target, which a plan needs. Remove --offload, and add "
            "`offload` and `offload_activations` to the plan file."
        )
    named = name in schedules.FAMILIES and not schedules.find(name).to_measure
    why = [f"The simulated bubble is {percent_text(answer['bubble_fraction'])} of the step."]
    if best := answer.get("best_named"):
        why.append(f"The fastest named schedule, {best['name']}, takes {seconds_text(best['makespan_seconds'])}.")
    if "lower_bound_seconds" in answer:
        why.append(f"No schedule takes less than {seconds_text(answer['lower_bound_seconds'])}.")
    model = {} if inputs.model is None else inputs.model.planned(schedule, answer)
    return Plan(
        schedule=name if named else schedule,
        pipeline=schedule.num_ranks,
        microbatches=schedule.num_microbatches,
        data=1 if options.data is None else options.data,
        virtual_stages=schedule.placement.num_chunks,
        slices=schedule.num_slices if schedule.num_slices > 1 else None,
        data_strategy=options.data_strategy,
        data_granularity=options.data_granularity,
        **{
            "predicted_step_seconds": answer["makespan_seconds"] if measured else None,
            "predicted_memory_bytes": tuple(answer["peak_bytes"]) if measured and "peak_bytes" in answer else None,
            "why": tuple(why) if measured else (),
            **model,
        },
    ).to_json()


def _print_notes(answer: dict[str, Any]) -> None:
    """Print the numbers that the tables leave out: memory per rank, links, and the bound of the search."""
    name = answer["schedule"]
    if answer.get("forward_only"):
        print(f"{name}: forwards only, as in evaluation")
    peaks = answer.get("peak_bytes") or answer.get("peak_memory")
    if peaks:
        over = "" if answer.get("within_memory", True) else "; over the limit"
        if "peak_bytes" in answer:
            print(f"{name}: peak activation memory per rank {', '.join(map(bytes_text, peaks))}{over}")
        else:
            shown = " ".join(f"{peak:.6g}" for peak in peaks)
            print(f"{name}: peak memory per rank {shown} (activations of one rank for one micro-batch){over}")
    if data := answer.get("data"):
        print(f"{name}: {data['degree']} replicas, {data['strategy']}, granularity {data['granularity']}")
    for link, where in (("data", "to other replicas"), ("memory", "to the offload target")):
        if seconds := answer.get(f"{link}_link_seconds"):
            makespan = answer["makespan_seconds"]
            print(f"{name}: a link {where} is busy for up to {max(seconds):.6g} s of {makespan:.6g} s")
    if "weight_version_bytes" in answer and "data" not in answer:
        held = " ".join(f"{size:.6g}" for size in answer["weight_version_bytes"])
        print(f"{name}: peak of all parameter versions per rank {held} bytes")
    if "lower_bound_seconds" in answer:
        said = "no named schedule keeps the limits"
        if best := answer["best_named"]:
            said = f"the best named schedule is {best['name']} with {best['makespan_seconds']:.6g} s"
        print(f"{name}: {answer['makespan_seconds']:.6g} s; {said}; lower bound {answer['lower_bound_seconds']:.6g} s")


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom simulate",
        description="Simulate a schedule, or compare several. Times are seconds per rank and micro-batch. With V\n"
        "virtual stages per rank each stage takes 1/V of the time, and with K slices each slice takes 1/K. F is\n"
        "a forward, B a full backward, I a backward for inputs, W a backward for weights; B takes I + W.",
        examples=_EXAMPLES,
    )
    names = f"schedule, or `compare` and several: {', '.join(schedules.FAMILIES)}"
    option = parser.add_argument
    text, whole, number, rate = (partial(option, type=kind) for kind in (str, int, float, BytesPerSecond))
    text("names", nargs="+", help=f"{names}; or a file: .csv, .json, .py:function")
    whole("--ranks", required=True, help="pipeline-parallel degree")
    whole("--microbatches", required=True, help="micro-batches per step; asynchronous schedules: in total")
    whole("--chunks", help="virtual stages (chunks) per rank (default: the schedule's own)")
    whole("--slices", default=1, help="slices per sequence")
    text("--weights", metavar="stash|vertical", help="weight versioning of pipedream (default: stash)")
    text("--replicas", metavar="N,N,..", help="ranks per stage, of 1f1b and asynchronous schedules (default: 1 each)")
    whole("--microbatches-per-update", help="asynchronous schedules: micro-batches per update of a stage")
    in_flight = "asynchronous schedules: limit on in-flight micro-batches (default: noam)"
    text("--in-flight", metavar="noam|full|N", help=in_flight)
    number("--forward", help="seconds per forward (default: 1)")
    number("--backward-input", help="seconds per backward of the inputs (default: 1)")
    number("--backward-weight", help="seconds per backward of the weights (default: 1)")
    number("--overlap", default=1.0, help="time of an overlapped F and B, as a fraction of their sum")
    number("--latency", help="latency of a message between two ranks in seconds (default: 0)")
    text("--costs", metavar="FILE", help="JSON file with times and sizes per stage, instead of the options")
    text(
        "--slow-rank",
        action="append",
        metavar="RANK:FACTOR",
        help="slowdown factor of a rank's computations; repeatable",
    )
    number("--memory-limit", help="peak activation limit; 1: activations of one rank for one micro-batch")
    number("--weight-gradient-memory", help="fraction of an activation kept between I and W (default: 1)")
    option("--placement", choices=("loop", "v"), help="search: placement of virtual stages (default: loop)")
    number("--effort", help="search: fixed amount of work, about X seconds (default: 6)")
    number("--prove", help="search: time limit in seconds for OR-Tools CP-SAT")
    strategies, periods = ([each.value for each in kind] for kind in (DataStrategy, Granularity))
    whole("--data", help="data-parallel degree; micro-batches are per replica (default: none)")
    option("--data-strategy", choices=strategies, help="strategy (default: ddp)")
    option("--data-granularity", choices=periods, help="how often zero2 and zero3 gather and reduce (default: step)")
    rate("--data-bandwidth", help="bandwidth per rank to other replicas (default: no limit)")
    rate("--data-sum-bandwidth", help="bandwidth per rank of reductions (default: --data-bandwidth)")
    number("--data-latency", help="latency of a message between replicas in seconds (default: 0)")
    number("--data-slowdown", help="slowdown of computations during collectives, 0 to 1 (default: 0)")
    text("--lose", metavar="RANK:REPLICA", help="with --data: also simulate a step without one rank")
    whole("--units", help="communication buckets per stage (default: 1)")
    text("--cluster", metavar="NAME|FILE", help="devices and links: a name, such as dgx-h100, or a JSON file")
    option("--parameter-bytes", type=Bytes, help="bytes of parameters per rank")
    number("--offload", help="live activations kept per rank; the others are offloaded (default: all)")
    rate("--memory-bandwidth", help="bandwidth to the offload target (default: no limit)")
    option("--activation-bytes", type=Bytes, help="bytes of activations per rank and micro-batch")
    add_model_options(parser)
    option("--json", action="store_true", help="output as one JSON object")
    text("--out", metavar="FILE", help="plan file to write, for `pipeloom train --plan`")
    text("--csv", metavar="FILE", help="CSV file to write, in the format of torch.distributed.pipelining")
    text("--html", metavar="FILE", help="HTML file to write, with timeline and numbers")
    text("--svg", metavar="FILE", help="SVG file to write, with the timeline")
    option("--critical-path", action="store_true", help="underline the critical path in --svg and --html")
    text("--trace", metavar="FILE", help="trace to write for https://ui.perfetto.dev, .json or .json.gz")
    return parser


def _content(kind: str, made: Sequence[_Simulated], inputs: Inputs) -> str | bytes:
    """The content of the output file of option `kind`. Raises InputError if there is no plan of the schedule."""
    timelines, critical = [each.timeline for each in made], inputs.options.critical_path
    if kind == "out":
        return _plan_json(made[0], inputs) + "\n"
    if kind == "csv":
        return to_csv(made[0].schedule)
    from pipeloom.report import simulation_html, timeline_svg
    from pipeloom.report.perfetto import trace_bytes

    if kind == "trace":
        return trace_bytes(timelines[0], compressed=inputs.options.trace.endswith(".gz"))
    if kind == "svg":
        return timeline_svg(timelines, standalone=True, critical=critical) + "\n"
    return simulation_html(timelines, critical=critical)
