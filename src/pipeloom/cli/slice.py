"""`pipeloom slice`: the best slices of sequences, and the time that they save."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import add_model_options, check_file_alone, given_model, measured_model, train_command
from pipeloom.common.atomic_file import write_named
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import counted, seconds_text
from pipeloom.errors import InputError
from pipeloom.plan.plan import Plan
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
from pipeloom.schedules import FAMILIES
from pipeloom.split.chain_partition import even_parts

_GRID = 8
_MOST_SPANS = 200_000  # of the timeline; more are too small to see


def main(argv: Sequence[str]) -> int:
    """Find and show slices; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    if given["grid"] is None:
        given["grid"] = max(1, min(_GRID, given["sequence"]))
    sizes = {name: given[name] for name in ("sequence", "batch", "grid")} | {"num_ranks": given["ranks"]}
    check_sizes(**sizes)
    schedule = _schedule(given)
    costs, errors = _costs(given)
    if schedule == "terapipe":  # pieces may differ; the answer is optimal
        found, whole = slice_batch(costs, **sizes), slice_batch(costs, **sizes, sliced=False)
        found = replace(found, peak_tokens=given["batch"] * given["sequence"])
    else:
        found = slice_for_schedule(costs, schedule=schedule, **sizes, memory_limit=given["memory_limit"])
        whole = slice_for_schedule(costs, schedule=schedule, **sizes, sliced=False)
    if given["write_costs"] is not None:
        write_named("--write-costs", given["write_costs"], costs.to_json() + "\n")
    if given["out"] is not None:
        plan = _plan(costs, found, whole, schedule=schedule, sizes=sizes)
        write_named("--out", given["out"], plan.to_json() + "\n")
    if given["json"]:
        answer = {
            "slices": [list(lengths) for lengths in found.slices],
            "batch": list(found.batch),
            "predicted_seconds": found.predicted_seconds,
            "unsliced_seconds": whole.predicted_seconds,
            "max_slice_seconds": found.max_slice_seconds,
        }
        print(json.dumps(answer))
        return 0
    _show(found, whole, costs, errors, schedule)
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
    add_model_options(parser, but=("sequence_length",))
    return parser


def _costs(given: dict[str, Any]) -> tuple[SliceCosts, tuple[float, float] | None]:
    """The slice times and, where they were measured, the error of the fit (forward, backward)."""
    if given["costs"] is not None:
        check_file_alone(given, "--costs", ("write_costs",), "the slice times")
        return parse_file("--costs", given["costs"], parse_slice_costs), None
    from pipeloom.plan.slicing.measure_slices import measure_slices

    config = measured_model(given, sequence_length=given["sequence"])
    costs, *errors = measure_slices(config, num_ranks=given["ranks"], grid=given["grid"], batch=given["batch"])
    return costs, (errors[0], errors[1])


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
