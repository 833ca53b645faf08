"""`pipeloom memory`: predicted peak memory per rank and kind, or predicted and measured memory of a run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from pipeloom.cli.common.optimizer_table import check_optimizers_alone, print_optimizers
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.planning import train_command
from pipeloom.cli.common.train_options import difference, make_parser, print_config, read_options, to_config
from pipeloom.common.atomic_file import check_named, write_named
from pipeloom.common.json_reader import parse_file
from pipeloom.common.quantities import bytes_text, seconds_text, table_lines
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.local.saved import notices
from pipeloom.plan.memory import KINDS, Choice, MemoryRow, read_memory
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import plan_of_options
from pipeloom.sim import CostsFile, parse_costs
from pipeloom.train.config.cluster_costs import cluster_costs, cluster_step_seconds
from pipeloom.train.config.memory import chosen_words, planned_memory, under_cap
from pipeloom.train.config.schedule import make_schedule, resolve_data_degree
from pipeloom.train.config.train_config import TrainConfig, flat

_DESCRIPTION = """\
Peak memory per rank and kind from closed forms, without building the model. The options are those of `pipeloom train`,
so its command line can be pasted here. With --run, the predicted and measured memory of a run."""
_EXAMPLES = """
pipeloom memory --parallel.pipeline 4 --model.layers 24 --model.width 1024 --model.heads 16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --precision.dtype bf16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --memory.cap 24MiB
pipeloom memory --memory.cap 60MiB --out plan.json
pipeloom memory --parallel.pipeline 8 --model.layers 48 --model.width 4096 --model.heads 32 --cluster dgx-h100
pipeloom memory --optimizers --parallel.data 8 --parallel.data_strategy zero1 --precision.dtype bf16
pipeloom memory --run runs/train
"""


def main(argv: Sequence[str]) -> int:
    """Print the table of a configuration, or of a run; returns the exit code."""
    options = read_options(_parser(), argv)
    if options.run is not None:
        if options.out is not None:
            raise InputError(f"--out={options.out}: a finished run makes no plan. Remove --out, or --run.")
        _print_run(read_memory(Path(options.run)), as_json=options.json)
        return 0
    asked = to_config(options.as_dict())
    if asked.parallel.auto:
        raise InputError("--parallel auto: the degrees are unknown before a run. Give them, or --plan of a run.")
    config = resolve_data_degree(asked, None)
    from pipeloom.train.config.rules.settings import validate_settings

    validate_settings(config)
    if options.print_config is not None:
        print_config(config, options.print_config)
        return 0
    check_named({"--out": options.out})
    vocabulary = options.vocabulary_size
    if vocabulary is None:
        from pipeloom.train.data.opening import run_tokenizer

        vocabulary = run_tokenizer(config).vocabulary_size
    elif vocabulary < 1:
        raise InputError(f"--vocabulary_size={vocabulary}: must be at least 1.")
    if options.optimizers:
        check_optimizers_alone(options)
        print_optimizers(config, vocabulary, as_json=options.json)
        return 0
    file, cluster = _times(options, config, vocabulary)
    cap = config.memory.cap
    config, choice = under_cap(config, vocabulary, file=file)
    step = None if cluster is None else cluster_step_seconds(config, vocabulary, cluster)
    if options.out is not None:
        why = [f"Of the options that keep {cap} per rank, {chosen_words(config)} is the fastest."] if cap else []
        seconds = step or (choice.seconds if choice is not None and file is not None else None)
        plan = _plan(config, vocabulary, seconds=seconds, why=why)
        write_named("--out", options.out, plan.to_json() + "\n")
    _print_prediction(config, vocabulary, choice, cluster, step, as_json=options.json)
    if options.out is not None and not options.json:
        model = difference(config.gpt_sizes, TrainConfig().gpt_sizes)
        chosen = {"plan": options.out, **{f"model.{name}": value for name, value in model.items()}}
        print(f"wrote {options.out}; run it: {train_command(chosen)}")
    return 0


@cache
def _parser() -> Parser:
    parser = make_parser("pipeloom memory", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--run", type=str, metavar="DIR", help="show predicted and measured memory of the run in DIR")
    parser.add_argument(
        "--costs", type=str, metavar="FILE", help="JSON file with times of stages and links, for --memory.cap"
    )
    parser.add_argument(
        "--cluster", type=str, metavar="NAME|FILE", help="cluster, such as dgx-h100: step time, and room on its devices"
    )
    parser.add_argument("--vocabulary_size", type=int, help="vocabulary size (default: that of data.tokenizer)")
    parser.add_argument("--out", type=str, metavar="FILE", help="plan file to write, for `pipeloom train --plan`")
    parser.add_argument(
        "--optimizers",
        action="store_true",
        help="bytes per parameter of all optimizers, in place of the memory of ranks",
    )
    parser.add_argument("--json", action="store_true", help="output as one JSON object")
    return parser


def _times(options: Namespace, config: TrainConfig, vocabulary: int) -> tuple[CostsFile | None, Cluster | None]:
    """The times of stages and links that weigh memory, and the cluster, as far as options name them."""
    if options.costs is not None and config.memory.cap is None:
        raise InputError(
            "--costs works only with --memory.cap, which weighs memory against time. Add --memory.cap, or remove "
            "--costs."
        )
    if options.costs is not None and options.cluster is not None:
        raise InputError("--cluster: does not work with --costs, which has times of its own. Remove one of them.")
    file = None if options.costs is None else parse_file("--costs", options.costs, parse_costs)
    cluster = None if options.cluster is None else find_cluster(options.cluster, "--cluster")
    if cluster is not None and config.memory.cap is not None:
        file = cluster_costs(config, vocabulary, cluster)
    return file, cluster


def _plan(config: TrainConfig, vocabulary: int, *, seconds: float | None, why: Sequence[str]) -> Plan:
    """The configuration as a plan with the predicted memory and, if known, the seconds per step."""
    sizes = config.model
    counted_for = (
        f"Memory is predicted for optimizer {config.optimizer.name} and a GPT with {sizes.layers} blocks of width "
        f"{sizes.width} on sequences of {sizes.sequence_length} tokens."
    )
    return plan_of_options(
        dict(flat(asdict(config))),
        make_schedule(config),
        microbatches=config.num_microbatches,
        predicted_step_seconds=seconds,
        predicted_memory_bytes=tuple(rank.peak for rank in planned_memory(config, vocabulary)),
        why=(*why, counted_for),
    )


def _print_prediction(
    config: TrainConfig,
    vocabulary: int,
    choice: Choice | None,
    cluster: Cluster | None,
    step: float | None,
    *,
    as_json: bool,
) -> None:
    replicas = config.parameter_replicas
    shown = [0, 1] if replicas > 1 and config.data_parallel.kind.has_server else [0]
    ranks = [rank for replica in shown for rank in planned_memory(config, vocabulary, replica=replica)]
    weights = {replica: replicas - 1 if replica else 1 for replica in shown} if len(shown) > 1 else {0: replicas}
    total = config.parallel.tensor * sum(weights[rank.replica] * rank.peak for rank in ranks)
    largest = max(ranks, key=lambda rank: rank.peak)
    if as_json:
        answer: dict[str, Any] = {
            "ranks": [{"copy": r.replica, "rank": r.rank, **r.kinds, "peak": r.peak} for r in ranks],
            "copies": config.data_degree,
            "processes_per_stage": config.stage_processes,
            "total": total,
            "largest_rank": largest.rank,
        }
        if cluster is not None:
            answer |= {"step_seconds": step, "device_bytes": cluster.device_bytes(config.num_processes)}
        if choice is not None:
            answer["chosen"] = {
                "data_granularity": config.parallel.data_granularity,
                "recompute": config.memory.recompute,
                "step_seconds": choice.seconds,
            }
        print(json.dumps(answer, allow_nan=False))
        return
    names = [f"rank {r.rank}" + (f", replica {r.replica}" if len(shown) > 1 else "") for r in ranks]
    _print_table([{"": name, **_texts({**r.kinds, "peak": r.peak})} for name, r in zip(names, ranks, strict=True)])
    of = f", {config.data_degree} data-parallel replicas" if config.data_degree > 1 else ""
    of += f", {config.stage_processes} processes per stage" if config.stage_processes > 1 else ""
    most = f"largest: {names[ranks.index(largest)]} with {bytes_text(largest.peak)}"
    print(f"all ranks{of}: {bytes_text(total)}; {most}")
    if cluster is not None and step is not None:
        print("".join(f"{line}\n" for line in notices(cluster)), end="")
        room = _room(cluster.device_bytes(config.num_processes), largest.peak)
        print(f"{cluster.name}: {seconds_text(step)} per step{room}")
    if choice is not None:
        print(f"under the cap with {chosen_words(config)}")


def _room(memory: float | None, peak: float) -> str:
    """Whether a device has enough memory; empty if its memory is unknown."""
    if memory is None:
        return ""
    rest = memory - peak
    return f"; of {bytes_text(memory)} per device, {bytes_text(abs(rest))} {'are left' if rest >= 0 else 'are missing'}"


def _print_run(rows: Sequence[MemoryRow], *, as_json: bool) -> None:
    if as_json:
        processes = [
            {"process": r.process, "copy": r.replica, "rank": r.rank, "predicted": r.predicted, "measured": r.measured}
            for r in rows
        ]
        print(json.dumps({"processes": processes}, allow_nan=False))
        return
    table = []
    for row in rows:
        for name, sizes in (("predicted", row.predicted), ("measured", row.measured)):
            first = f"process {row.process} (rank {row.rank}, replica {row.replica})" if name == "predicted" else ""
            table.append({"": first, " ": name, **_texts(sizes)})
    _print_table(table)


def _texts(sizes: Mapping[str, float | None]) -> dict[str, str]:
    """Sizes by kind, and the peak, as text."""
    return {kind: "-" if sizes.get(kind) is None else bytes_text(sizes[kind] or 0) for kind in (*KINDS, "peak")}


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    columns = [name for name in rows[0] if any(row[name] not in ("0 B", "-") for row in rows)]
    cells = [columns, *([row[name] for name in columns] for row in rows)]
    print("\n".join(table_lines(cells, left=[index for index, name in enumerate(columns) if not name.strip()])))
