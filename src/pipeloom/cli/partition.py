"""`pipeloom partition`: which layers make a stage, on how many ranks, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from pipeloom.cli.files import read_json, write_text
from pipeloom.cli.model_options import add_model_options, check_file_alone, given_model, whole_model
from pipeloom.cli.parser import Parser
from pipeloom.cli.partition_answers import asynchronous, synchronous
from pipeloom.common.quantities import Bytes, BytesPerSecond
from pipeloom.errors import InputError
from pipeloom.plan.partition import Form, Profile, check_levels, parse_profile


def main(argv: Sequence[str]) -> int:
    """Find the partition and show it; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    levels = _levels(given)
    check_levels(levels)
    _check_schedule(given)
    profile = _profile(given, math.prod(components for components, _ in levels))
    lines = []
    if given["write_profile"] is not None:
        write_text("--write-profile", given["write_profile"], profile.to_json() + "\n")
        lines.append(f"wrote {given['write_profile']}")
    if given["schedule"] == "dapple":
        answer, more = synchronous(
            profile, *levels[0], num_microbatches=given["microbatches"], published=given["form"] == "published"
        )
    else:
        keys = ("form", "memory_cap", "state_copies")
        answer, more = asynchronous(profile, levels, run=_run(given), **{key: given[key] for key in keys})
    if given["json"]:
        print(json.dumps(answer))
        return 0
    print("\n".join([*lines, *more]))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom partition",
        description="Cut a model into stages, and give each its ranks, so that a pipeline takes least time.\n"
        "What layers take is read from --profile, or measured here on a GPT (--model.*).",
        examples="""
            pipeloom partition --profile profile.json --ranks 8 --bandwidth 1.25e9
            pipeloom partition --profile profile.json --levels 4@12GB,4@1.25GB --memory-cap 16GB --state-copies 3
            pipeloom partition --ranks 4 --bandwidth 1e9 --model.layers 12 --batch 8 --write-profile profile.json
            pipeloom partition --profile profile.json --ranks 8 --bandwidth 1.25e9 --schedule dapple --microbatches 16
        """,
    )
    parser.add_argument("--profile", type=str, help="JSON file of what each layer takes, instead of measuring")
    parser.add_argument("--ranks", type=int | None, help="ranks that share the model")
    parser.add_argument("--bandwidth", type=BytesPerSecond | None, help="bytes a second, of each rank")
    parser.add_argument("--levels", type=str, help="instead of both: components@bandwidth of each level, inner first")
    parser.add_argument(
        "--form", type=Form, default="summed", help="how a plan is judged; published: as in the schedule's paper"
    )
    parser.add_argument("--memory-cap", type=Bytes | None, help="most bytes a rank may hold")
    parser.add_argument(
        "--state-copies", type=float, default=0.0, help="of the weights, for gradients and optimizer (AdamW: 3)"
    )
    parser.add_argument(
        "--schedule", type=Literal["pipedream", "dapple"], default="pipedream", help="dapple: synchronous steps of 1F1B"
    )
    parser.add_argument("--microbatches", type=int | None, help="of a step, for --schedule dapple")
    parser.add_argument("--batch", type=int | None, help="without --profile: sequences of a minibatch (1)")
    parser.add_argument("--write-profile", type=str, help="write what was measured, for --profile")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object and nothing else")
    add_model_options(parser)
    return parser


# --- what is asked --------------------------------------------------------------------------------------------------


def _levels(given: dict[str, Any]) -> list[tuple[int, float]]:
    """(components, bandwidth) of every level, innermost first."""
    ranks, bandwidth, text = given["ranks"], given["bandwidth"], given["levels"]
    if text is None:
        if ranks is None or bandwidth is None:
            missing = "--ranks" if ranks is None else "--bandwidth"
            raise InputError(f"{missing} is missing: the command needs both, or --levels; add it")
        return [(ranks, bandwidth)]
    if bandwidth is not None:
        raise InputError("--bandwidth beside --levels: each level has its own; drop one of the two")
    levels: list[tuple[int, float]] = []
    for part in text.split(","):
        components, _, rate = part.partition("@")
        try:
            levels.append((int(components), BytesPerSecond.parse(rate)))
        except ValueError as error:
            raise InputError(
                f"--levels {text}: {part!r} is no level; write components@bytes_per_second, such as 4@12e9,4@1.25e9"
            ) from error
    total = math.prod(components for components, _ in levels)
    if ranks is not None and ranks != total:
        raise InputError(f"--ranks {ranks} beside --levels {text}: the levels have {total} ranks; drop --ranks")
    return levels


def _check_schedule(given: dict[str, Any]) -> None:
    dapple = given["schedule"] == "dapple"
    if dapple != (given["microbatches"] is not None):
        raise InputError(
            "--schedule dapple needs --microbatches: how many a step has; add it"
            if dapple
            else "--microbatches without --schedule dapple: PipeDream has no steps; drop one, or add the other"
        )
    for name, default in (("levels", None), ("memory_cap", None), ("state_copies", 0.0)):
        if dapple and given[name] != default:
            option = "--" + name.replace("_", "-")
            raise InputError(f"{option} with --schedule dapple: its planner knows none; drop one of the two")


def _profile(given: dict[str, Any], num_ranks: int) -> Profile:
    """Read, or measured here.

    Raises:
        InputError: the file cannot be read, it stands beside sizes of a model, or those are wrong.
    """
    path = given["profile"]
    if path is not None:
        check_file_alone(given, "--profile", ("batch", "write_profile"), "what layers take")
        return read_json("--profile", path, parse_profile)
    from pipeloom.models import GPTConfig
    from pipeloom.plan.partition.measure_layers import measure_gpt

    batch = 1 if given["batch"] is None else given["batch"]
    return measure_gpt(GPTConfig(**whole_model(given)), batch=batch, num_ranks=num_ranks)


def _run(given: dict[str, Any]) -> dict[str, Any]:
    """Options of a training run on what was measured here; of what a file holds, nothing is known."""
    if given["profile"] is not None:
        return {}
    model = {f"model.{name}": value for name, value in given_model(given).items()}
    return {**model, "batch.size": 1 if given["batch"] is None else given["batch"]}
