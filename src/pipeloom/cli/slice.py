"""`pipeloom slice`: the best slices of sequences, and the time that they save."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pipeloom.cli.common.inside_options import (
    add_inside_options,
    check_has_effect,
    inside_of,
    inside_text,
    plan_fields,
)
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import add_model_options, check_file_alone, given_model, measured_model, train_command
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.division import even_parts
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import BytesPerSecond, bytes_text, counted, seconds_text
from pipeloom.errors import InputError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.plan import Plan
from pipeloom.plan.shared_layers import ELEMENT, NO_LIMIT, SharedLayers
from pipeloom.plan.slicing import (
    SliceCosts,
    Slicing,
    check_sizes,
    parse_slice_costs,
    scheduled_timeline,
    slice_batch,
    slice_for_schedule,
    slicing_timeline,
)
from pipeloom.plan.slicing.shared_costs import share_costs
from pipeloom.schedules import FAMILIES

_GRID = 8
_MOST_SPANS = 200_000  # of the timeline; more are too small to see


def main(argv: Sequence[str]) -> int:
    """Find and show slices; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    given["inside"] = inside = inside_of(given)
    if given["grid"] is None:
        given["grid"] = max(1, min(math.lcm(_GRID, inside.tensor) if inside.sequence else _GRID, given["sequence"]))
    sizes = {name: given[name] for name in ("sequence", "batch", "grid")} | {"num_ranks": given["ranks"]}
    check_sizes(**sizes)
    _check_inside(given)
    schedule = _schedule(given)
    check_named({"--write-costs": given["write_costs"], "--out": given["out"]})
    measured, errors = _costs(given)
    costs, note = _shared(given, measured)
    if schedule == "terapipe":  # pieces may differ; the answer is optimal
        found, whole = slice_batch(costs, **sizes), slice_batch(costs, **sizes, sliced=False)
        found = replace(found, peak_tokens=given["batch"] * given["sequence"])
    else:
        found = slice_for_schedule(costs, schedule=schedule, **sizes, memory_limit=given["memory_limit"])
        whole = slice_for_schedule(costs, schedule=schedule, **sizes, sliced=False)
    if given["write_costs"] is not None:
        write_named("--write-costs", given["write_costs"], measured.to_json() + "\n")
    if given["out"] is not None:
        plan = _plan(costs, found, whole, schedule=schedule, sizes=sizes)
        if inside.tensor > 1:
            plan = replace(plan, why=(*plan.why, *note), **plan_fields(inside))
        write_named("--out", given["out"], plan.to_json() + "\n")
    if given["json"]:
        answer = {
            "slices": [list(lengths) for lengths in found.slices],
            "batch": list(found.batch),
            "predicted_seconds": found.predicted_seconds,
            "unsliced_seconds": whole.predicted_seconds,
            "max_slice_seconds": found.max_slice_seconds,
        }
        if inside.tensor > 1:
            answer["devices"] = given["ranks"] * inside.tensor
        print(json.dumps(answer))
        return 0
    _show(found, whole, costs, errors, schedule)
    print("".join(f"{line}\n" for line in note), end="")
    if given["write_costs"] is not None:
        print(f"wrote {given['write_costs']}")
    if given["out"] is not None:
        options = {"plan": given["out"], **given_model(given), "model.sequence_length": given["sequence"]}
        print(f"wrote {given['out']}; run it: {train_command(options)}")
    return 0


def _plan(costs: SliceCosts, found: Slicing, whole: Slicing, *, schedule: str, sizes: dict[str, Any]) -> Plan:
    """The slicing as a plan. A run cuts all micro-batches alike; if `found` does not, another slicing is found."""
    why = []
    if len({*found.slices}) > 1 or [*found.batch] != even_parts(sizes["batch"], len(found.batch)):
        unequal = seconds_text(found.predicted_seconds)
        why = [f"All micro-batches are cut alike, as a run needs; different cuts would take {unequal}."]
        found = slice_for_schedule(costs, schedule=schedule, **sizes)
    return Plan(
        schedule=schedule,
        pipeline=found.num_ranks,
        microbatches=len(found.batch),
        batch_size=sizes["batch"],
        slices=found.slices[0] if len(found.slices[0]) > 1 else None,
        predicted_step_seconds=found.predicted_seconds,
        why=(_gain(found, whole, schedule), *why),
    )


def _schedule(given: dict[str, Any]) -> str:
    """The schedule on the command line, or one that keeps the memory limit; terapipe holds all tokens of the batch."""
    named: str | None = given["schedule"]
    limit, tokens = given["memory_limit"], given["batch"] * given["sequence"]
    if limit is None or tokens <= limit:
        return named or "terapipe"
    if named == "terapipe":
        raise InputError(
            f"--memory-limit={limit}: --schedule terapipe runs all forwards first and holds all {tokens} tokens of the "
            "batch. Raise the limit, or remove --schedule."
        )
    return named or "seq1f1b"


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom slice",
        description="Cut sequences into slices, and a batch into micro-batches, for the shortest step of a pipeline.\n"
        "Slice times come from --costs, or are measured here on one rank's share of a GPT's blocks (--model.*).",
        examples="""
            pipeloom slice --sequence 2048 --ranks 8 --batch 1 --costs costs.json
            pipeloom slice --sequence 1024 --ranks 2 --batch 1 --model.layers 8 --grid 32
            pipeloom slice --sequence 2048 --ranks 8 --batch 4 --costs costs.json --memory-limit 4096 --json
            pipeloom slice --sequence 2048 --ranks 8 --batch 1 --costs costs.json --schedule seq1f1b
            pipeloom slice --sequence 1024 --ranks 2 --batch 4 --schedule seq1f1b --out plan.json
        """,
    )
    option = parser.add_argument
    option("--sequence", type=int, required=True, help="sequence length in tokens")
    option("--ranks", type=int, required=True, help="pipeline-parallel degree")
    option("--batch", type=int, required=True, help="batch size in sequences")
    option("--costs", type=str, metavar="FILE", help="JSON file with slice times (default: measure a GPT)")
    option("--write-costs", type=str, metavar="FILE", help="JSON file to write with slice times, for --costs")
    option("--grid", type=int, help="slice lengths are multiples of N tokens (default: 8)")
    sliced = [each.name for each in FAMILIES.values() if each.sliced and each.chunks is not None]
    chosen = "schedule (default: terapipe, or seq1f1b if only that fits --memory-limit)"
    option("--schedule", choices=sliced, help=chosen)
    option("--memory-limit", type=int, help="limit of tokens per rank whose activations are kept")
    option("--out", type=str, metavar="FILE", help="plan file to write, for `pipeloom train --plan`")
    option("--json", action="store_true", help="output as one JSON object")
    group = parser.add_argument_group("processes that share a stage: a rank is so many of them")
    add_inside_options(group)
    rate = "bandwidth per process inside a stage (default: that of messages between ranks)"
    group.add_argument("--node-bandwidth", type=BytesPerSecond | None, help=rate)
    add_model_options(parser, but=("sequence_length",))
    return parser


def _costs(given: dict[str, Any]) -> tuple[SliceCosts, tuple[float, float] | None]:
    """The slice times and, where they were measured, the error of the fit (forward, backward)."""
    if given["costs"] is not None:
        check_file_alone(given, "--costs", ("write-costs",), "the slice times", sized=given["inside"].tensor > 1)
        return parse_file("--costs", given["costs"], parse_slice_costs), None
    from pipeloom.plan.slicing.measure_slices import measure_slices

    config = measured_model(given, sequence_length=given["sequence"])
    costs, *errors = measure_slices(config, num_ranks=given["ranks"], grid=given["grid"], batch=given["batch"])
    return costs, (errors[0], errors[1])


def _check_inside(given: dict[str, Any]) -> None:
    """Raises InputError where the processes of a stage do not work with slices."""
    inside = given["inside"]
    check_has_effect(given, inside)
    if given["node_bandwidth"] is not None and inside.tensor == 1:
        raise InputError("--node-bandwidth: has no effect without --tensor. Remove it.")
    if inside.context > 1:
        raise InputError(
            f"--context {inside.context}: does not work with slices, which cut the sequence too. Remove --context, or "
            "use `pipeloom simulate --model` for whole sequences."
        )
    if inside.layout != "1d":
        raise InputError(
            f"--tensor-layout {inside.layout}: cuts the samples of micro-batches, which may be one here. Use 1d."
        )
    for name in ("grid", "sequence") if inside.sequence else ():
        if given[name] % inside.tensor:
            raise InputError(
                f"--{name} {given[name]}: must be a multiple of --tensor {inside.tensor} with --sequence-parallel, "
                "which divides the tokens of each slice. Use another number."
            )


def _shared(given: dict[str, Any], costs: SliceCosts) -> tuple[SliceCosts, list[str]]:
    """The costs on one of the processes that share a stage, and a line that says how they were found."""
    inside = given["inside"]
    if inside.tensor == 1:
        return costs, []
    model = Architecture.of_gpt(measured_model(given, sequence_length=given["sequence"]))
    rate = model.width * ELEMENT / costs.seconds_per_token_sent if costs.seconds_per_token_sent else NO_LIMIT
    layers = SharedLayers(
        model=model,
        inside=inside,
        bytes_per_second=given["node_bandwidth"] or rate,
        latency_seconds=costs.latency,
    )
    layers.check()
    speed = "no limit" if layers.bytes_per_second == NO_LIMIT else f"{bytes_text(layers.bytes_per_second)}/s"
    note = (
        f"{inside_text(inside)}: the times are of one process; computation is divided, and collectives at {speed} "
        f"added ({seconds_text(sum(layers.collectives()))} per block and whole sequence)"
    )
    return share_costs(costs, layers, blocks=-(-model.layers // given["ranks"])), [note]


def _show(found: Slicing, whole: Slicing, costs: SliceCosts, errors: tuple[float, float] | None, schedule: str) -> None:
    from pipeloom.report.terminal import print_comparison

    if errors is not None:
        print(f"measured here; error of the fit: {100 * errors[0]:.1f} % forward, {100 * errors[1]:.1f} % backward")
    actions = 2 * found.num_ranks * (sum(map(len, found.slices)) + len(whole.slices))
    if actions <= _MOST_SPANS:
        print_comparison(
            [
                slicing_timeline(costs, each.slices, num_ranks=each.num_ranks, batch=each.batch, name=name)
                if schedule == "terapipe"
                else scheduled_timeline(costs, each, schedule=schedule, name=name)
                for name, each in (("unsliced", whole), ("sliced", found))
            ]
        )
    else:
        print(f"no timeline: {actions:,} spans are too many to show")
    for (size, lengths), group in groupby(zip(found.batch, found.slices, strict=True)):
        print(f"{len(list(group))} x {counted(size, 'sequence')}: slices {' '.join(map(str, lengths))}")
    print(
        f"{_gain(found, whole, schedule)}; the longest slice takes {seconds_text(found.max_slice_seconds)}; at most "
        f"{found.peak_tokens:,} tokens per rank"
    )


def _gain(found: Slicing, whole: Slicing, schedule: str) -> str:
    gain = whole.predicted_seconds / found.predicted_seconds if found.predicted_seconds else 1.0
    return (
        f"{seconds_text(found.predicted_seconds)} with slices, {seconds_text(whole.predicted_seconds)} without: "
        f"{gain:.2f}x in {schedule}"
    )
