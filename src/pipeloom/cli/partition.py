"""`pipeloom partition`: layers and ranks per stage, and the bottleneck."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from pipeloom.cli.common.inside_options import add_inside_options, check_has_effect, inside_of
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.partition_answers import StreamAnswer, SynchronousAnswer
from pipeloom.cli.common.planning import add_model_options, check_file_alone, given_model, measured_model
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import Bytes, BytesPerSecond
from pipeloom.errors import InputError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.partition import Form, Profile, check_levels
from pipeloom.plan.partition.graph_text import parse_profile_file
from pipeloom.plan.partition.shared_profile import samples_of, share_profile
from pipeloom.plan.shared_layers import SharedLayers


def main(argv: Sequence[str]) -> int:
    """Find and show a partition; returns the exit code."""
    given = _parser().parse_args(list(argv)).as_dict()
    check_named({"--write-profile": given["write_profile"], "--out": given["out"]})
    levels = _levels(given)
    check_levels(levels)
    given["inside"] = inside_of(given)
    _check_schedule(given)
    profile, options = _profile(given, math.prod(components for components, _ in levels))
    if given["write_profile"] is not None:
        write_named("--write-profile", given["write_profile"], profile.to_json() + "\n")
    given["layers"] = None
    if given["inside"].processes > 1:
        given["layers"] = layers = _layers(given, profile, levels[0][1])
        profile = share_profile(profile, layers)
        options = {**given_model(given), "batch.size": layers.samples}
    kind = SynchronousAnswer if given["schedule"] == "dapple" else StreamAnswer
    answer = kind(profile, levels, given, options)
    if given["out"] is not None:
        write_named("--out", given["out"], answer.plan().to_json() + "\n")
    if given["json"]:
        print(json.dumps(answer.numbers()))
        return 0
    written = [given[name] for name in ("write_profile", "out") if given[name] is not None]
    print("\n".join([*(f"wrote {path}" for path in written), *answer.lines(given["out"])]))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom partition",
        description="Cut a model into stages, and choose the number of replicas per stage, for the shortest step.\n"
        "Layer times come from --profile, or are measured here on a GPT (--model.*).",
        examples="""
            pipeloom partition --profile profile.json --ranks 8 --bandwidth 1.25e9
            pipeloom partition --profile profile.json --levels 4@12GB,4@1.25GB --memory-cap 16GB --state-copies 3
            pipeloom partition --ranks 4 --bandwidth 1e9 --model.layers 12 --batch 8 --write-profile profile.json
            pipeloom partition --profile profile.json --ranks 8 --bandwidth 1.25e9 --schedule dapple --microbatches 16
            pipeloom partition --ranks 2 --bandwidth 1e9 --out plan.json
            pipeloom partition --ranks 2 --tensor 2 --bandwidth 1e9 --schedule dapple --microbatches 8
        """,
    )
    option = parser.add_argument
    option(
        "--profile",
        type=str,
        metavar="FILE",
        help="JSON file with layer times, or a graph.txt of PipeDream (default: measure a GPT)",
    )
    option("--ranks", type=int | None, help="number of ranks that share the model")
    option("--bandwidth", type=BytesPerSecond | None, help="bandwidth per rank in bytes per second")
    levels = "hierarchical cluster: components@bandwidth per level, innermost first"
    option("--levels", type=str, metavar="N@RATE,..", help=levels)
    option(
        "--form",
        type=Form,
        default="summed",
        help="stage time: computation + synchronization; published: their maximum",
    )
    option("--memory-cap", type=Bytes | None, help="limit of peak memory per rank")
    states = "gradients and optimizer states, in multiples of the weights (AdamW: 3)"
    option("--state-copies", type=float, default=0.0, help=states)
    kinds = Literal["pipedream", "dapple"]
    option("--schedule", type=kinds, default="pipedream", help="pipedream: asynchronous; dapple: synchronous 1F1B")
    option("--microbatches", type=int | None, help="micro-batches per step, for --schedule dapple")
    option("--batch", type=int | None, help="sequences per measured micro-batch (default: 1)")
    option("--write-profile", type=str, metavar="FILE", help="JSON file to write with layer times, for --profile")
    option("--out", type=str, metavar="FILE", help="plan file to write, for `pipeloom train --plan`")
    option("--json", action="store_true", help="output as one JSON object")
    group = parser.add_argument_group("processes that share a stage: a rank is tensor x context of them")
    add_inside_options(group)
    rate = "bandwidth per process inside a stage (default: --bandwidth, or that of the innermost level)"
    group.add_argument("--node-bandwidth", type=BytesPerSecond | None, help=rate)
    add_model_options(parser)
    return parser


def _levels(given: dict[str, Any]) -> list[tuple[int, float]]:
    """(components, bandwidth) per level, innermost first."""
    ranks, bandwidth, text = given["ranks"], given["bandwidth"], given["levels"]
    if text is None:
        if ranks is None or bandwidth is None:
            missing = "--ranks" if ranks is None else "--bandwidth"
            raise InputError(f"{missing} is missing: give --ranks and --bandwidth, or --levels.")
        return [(ranks, bandwidth)]
    if bandwidth is not None:
        raise InputError(
            "--bandwidth: does not work with --levels, which has a bandwidth per level. Remove --bandwidth."
        )
    levels: list[tuple[int, float]] = []
    for part in text.split(","):
        components, _, rate = part.partition("@")
        try:
            levels.append((int(components), BytesPerSecond.parse(rate)))
        except ValueError as error:
            raise InputError(
                f"--levels={text}: {part!r} must be components@bandwidth. Write for example 4@12e9,4@1.25e9."
            ) from error
    total = math.prod(components for components, _ in levels)
    if ranks is not None and ranks != total:
        raise InputError(f"--ranks={ranks}: --levels {text} has {total} ranks. Remove --ranks.")
    return levels


def _check_schedule(given: dict[str, Any]) -> None:
    inside = given["inside"]
    check_has_effect(given, inside)
    if given["node_bandwidth"] is not None and inside.processes == 1:
        raise InputError("--node-bandwidth: has no effect without --tensor or --context. Remove it.")
    if inside.context > 1 and given["schedule"] == "pipedream":
        raise InputError(
            f"--context {inside.context}: does not work with --schedule pipedream, since asynchronous schedules do not "
            "support context parallelism. Use --schedule dapple."
        )
    if given["schedule"] != "dapple":
        if given["microbatches"] is not None:
            raise InputError(
                "--microbatches works only with --schedule dapple: PipeDream has no steps. Remove --microbatches."
            )
        return
    if given["microbatches"] is None:
        raise InputError("--schedule dapple needs the number of micro-batches per step. Add --microbatches.")
    if given["levels"] is not None:
        raise InputError(
            "--levels does not work with --schedule dapple, which assumes equal links. Use --ranks and --bandwidth "
            "instead."
        )


def _profile(given: dict[str, Any], num_ranks: int) -> tuple[Profile, dict[str, Any]]:
    """The profile of a file, or measured here; and options of a training run on the measured model."""
    if given["profile"] is not None:
        sized = given["inside"].processes > 1
        check_file_alone(given, "--profile", ("batch", "write-profile"), "the layer times", sized=sized)
        return parse_file("--profile", given["profile"], parse_profile_file), {}
    from pipeloom.plan.partition.profile import measure_gpt

    batch = 1 if given["batch"] is None else given["batch"]
    processes = num_ranks * given["inside"].processes
    profile = measure_gpt(measured_model(given), batch=batch, num_ranks=processes)
    return profile, {**given_model(given), "batch.size": batch}


def _layers(given: dict[str, Any], profile: Profile, bandwidth: float) -> SharedLayers:
    """The layers of the profile, on the processes that share a stage."""
    model = Architecture.of_gpt(measured_model(given))
    found = SharedLayers(
        model=model,
        inside=given["inside"],
        bytes_per_second=given["node_bandwidth"] or bandwidth,
        samples=samples_of(profile, model),
    )
    found.check()
    return found
