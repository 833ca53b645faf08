"""`pipeloom slice`: where to cut sequences so that a pipeline has something to do, and what that saves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pipeloom.cli.common.files import read_json, write_text
from pipeloom.cli.common.model_options import add_model_options, check_file_alone, whole_model
from pipeloom.cli.common.parser import Parser
from pipeloom.common.quantities import seconds_text
from pipeloom.errors import InputError
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
from pipeloom.sim import Timeline

_GRID = 8
_MOST_SPANS = 200_000  # a picture of more takes longer than it tells


def main(argv: Sequence[str]) -> int:
    """Find the slices and show them; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    if given["grid"] is None:
        given["grid"] = max(1, min(_GRID, given["sequence"]))
    sizes = {
        "sequence": given["sequence"],
        "num_ranks": given["ranks"],
        "batch": given["batch"],
        "grid": given["grid"],
    }
    check_sizes(**sizes)
    schedule, limit = _schedule(given), given["memory_limit"]
    costs, errors = _costs(given)
    if schedule == "terapipe":  # pieces may differ, and the answer is the best there is
        found, whole = slice_batch(costs, **sizes), slice_batch(costs, **sizes, sliced=False)
        found = replace(found, peak_tokens=given["batch"] * given["sequence"])
    else:
        found = slice_for_schedule(costs, schedule=schedule, **sizes, memory_limit=limit)
        whole = slice_for_schedule(costs, schedule=schedule, **sizes, sliced=False)
    if given["write_costs"] is not None:
        write_text("--write-costs", given["write_costs"], costs.to_json() + "\n")
    if given["json"]:
        print(json.dumps(answer(found, whole)))
        return 0
    _show(found, whole, costs, errors, schedule)
    if given["write_costs"] is not None:
        print(f"wrote {given['write_costs']}")
    return 0


def _schedule(given: dict[str, Any]) -> str:
    """The schedule that runs: the one that was named, or one that keeps the memory limit.

    Raises:
        InputError: terapipe, which holds every token of the batch, under a limit below that.
    """
    named: str | None = given["schedule"]
    limit, tokens = given["memory_limit"], given["batch"] * given["sequence"]
    if limit is None or tokens <= limit:
        return named or "terapipe"
    if named == "terapipe":
        raise InputError(
            f"a memory limit of {limit} tokens under --schedule terapipe: all forwards first hold the {tokens} tokens "
            "of the batch; allow as many, or leave --schedule out"
        )
    return named or "seq1f1b"


def answer(found: Slicing, whole: Slicing) -> dict[str, Any]:
    """The numbers that scripts read."""
    return {
        "slices": [list(lengths) for lengths in found.slices],
        "batch": list(found.batch),
        "predicted_seconds": found.predicted_seconds,
        "unsliced_seconds": whole.predicted_seconds,
        "max_slice_seconds": found.max_slice_seconds,
    }


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom slice",
        description="Cut sequences into slices, and a batch into pieces, so that a pipeline takes least time.\n"
        "What slices cost is read from --costs, or measured here on one rank's share of a GPT's blocks (--model.*).",
        examples="""
            pipeloom slice --sequence 2048 --ranks 8 --batch 1 --costs costs.json
            pipeloom slice --sequence 1024 --ranks 2 --batch 1 --model.layers 8 --grid 32
            pipeloom slice --sequence 2048 --ranks 8 --batch 4 --costs costs.json --memory-limit 4096 --json
            pipeloom slice --sequence 2048 --ranks 8 --batch 1 --costs costs.json --schedule seq1f1b
        """,
    )
    parser.add_argument("--sequence", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--ranks", type=int, required=True, help="ranks of the pipeline")
    parser.add_argument("--batch", type=int, required=True, help="sequences of a step")
    parser.add_argument("--costs", type=str, help="JSON file of what slices cost one rank, instead of measuring")
    parser.add_argument("--write-costs", type=str, help="write what was measured, for --costs")
    parser.add_argument("--grid", type=int, help="slices begin at multiples of it (8, or a shorter sequence)")
    parser.add_argument(
        "--schedule",
        choices=[each.name for each in FAMILIES.values() if each.sliced and each.chunks is not None],
        help="what runs: terapipe, all forwards first, or one whose backwards start early, simulated (terapipe, or "
        "seq1f1b where that alone keeps --memory-limit)",
    )
    parser.add_argument("--memory-limit", type=int, help="most tokens whose activations a rank may hold")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object and nothing else")
    add_model_options(parser, but=("sequence_length",))
    return parser


def _costs(given: dict[str, Any]) -> tuple[SliceCosts, tuple[float, float] | None]:
    """What slices cost, and the error of the fit (forward, backward) where they were measured.

    Raises:
        InputError: the file cannot be read, it stands beside sizes of a model, or those are wrong.
    """
    path = given["costs"]
    if path is None:
        return _measured(given)
    check_file_alone(given, "--costs", ("write_costs",), "what slices cost")
    return read_json("--costs", path, parse_slice_costs), None


def _measured(given: dict[str, Any]) -> tuple[SliceCosts, tuple[float, float]]:
    from pipeloom.models import GPTConfig
    from pipeloom.plan.slicing.measure_slices import measure_slices

    config = GPTConfig(**{**whole_model(given), "sequence_length": given["sequence"]})
    costs, *errors = measure_slices(config, num_ranks=given["ranks"], grid=given["grid"], batch=given["batch"])
    return costs, (errors[0], errors[1])


def _timeline(costs: SliceCosts, found: Slicing, schedule: str, name: str) -> Timeline:
    if schedule != "terapipe":
        return scheduled_timeline(costs, found, schedule=schedule, name=name)
    return slicing_timeline(costs, found.slices, num_ranks=found.num_ranks, batch=found.batch, name=name)


def _show(found: Slicing, whole: Slicing, costs: SliceCosts, errors: tuple[float, float] | None, schedule: str) -> None:
    from pipeloom.report.terminal import print_comparison

    if errors is not None:
        print(f"measured here; the fit is off by {100 * errors[0]:.1f} % forward, {100 * errors[1]:.1f} % backward")
    actions = 2 * found.num_ranks * (sum(map(len, found.slices)) + len(whole.slices))
    if actions <= _MOST_SPANS:
        print_comparison(
            [_timeline(costs, each, schedule, name) for name, each in (("unsliced", whole), ("sliced", found))]
        )
    else:
        print(f"no picture: {actions:,} spans are more than can be seen")
    for (size, lengths), group in groupby(zip(found.batch, found.slices, strict=True)):
        print(f"{len(list(group))} x a piece of {size}: slices {' '.join(map(str, lengths))}")
    gain = whole.predicted_seconds / found.predicted_seconds if found.predicted_seconds else 1.0
    print(
        f"{seconds_text(found.predicted_seconds)} with slices, {seconds_text(whole.predicted_seconds)} without: "
        f"{gain:.2f}x in {schedule}; the longest slice takes {seconds_text(found.max_slice_seconds)}; at most "
        f"{found.peak_tokens:,} tokens on a rank"
    )
