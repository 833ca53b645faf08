"""`pipeloom memory`: how much memory every rank takes, by kind, before a run or after it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeloom.cli.files import read_json_text
from pipeloom.cli.parser import Parser
from pipeloom.cli.train import make_parser, read_config, read_words
from pipeloom.errors import InputError
from pipeloom.plan.memory import KINDS, Choice, MemoryRow, choose_memory, choose_recompute, read_memory
from pipeloom.sim import parse_costs
from pipeloom.train.config import TrainConfig
from pipeloom.train.planned_memory import (
    data_axis,
    planned_memory,
    planned_model,
    planned_program,
)
from pipeloom.words import bytes_text

_DESCRIPTION = """\
How much memory every rank of a run takes, by kind, from closed forms: nothing is made, and nothing runs. The options
are those of `pipeloom train`, so that its command line can be pasted here. With --run, what a run took beside what was
predicted for it."""
_EXAMPLES = """
pipeloom memory --parallel.pipeline 4 --model.layers 24 --model.width 1024 --model.heads 16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --precision.dtype bf16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --memory-cap 24MiB
pipeloom memory --run runs/train
"""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def main(argv: Sequence[str]) -> int:
    """Print the table of a configuration, or of a run; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(read_words(parser, argv), env=False)
    if options.run is not None:
        rows = read_memory(Path(options.run))
        _print_run(rows, as_json=options.json)
        return 0
    config = read_config(options.as_dict())
    if config.parallel.data == -1:
        raise InputError("parallel.data is -1: how many copies there are follows from a run's processes; give a number")
    from pipeloom.train.validate import validate_settings

    validate_settings(config)
    vocabulary = _vocabulary(config, options.vocabulary_size)
    choice = None
    if options.memory_cap is not None:
        choice = _choose(config, vocabulary, _bytes("--memory-cap", options.memory_cap), options.costs)
        config = _chosen(config, choice)
    elif options.costs is not None:
        raise InputError("--costs without --memory-cap: times weigh what a cap can cost; give a cap, or leave it out")
    _print_plan(config, vocabulary, choice, as_json=options.json)
    return 0


def _parser() -> Parser:
    parser = make_parser("pipeloom memory", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--run", type=str, help="output_dir of a run: what was predicted and measured there")
    parser.add_argument("--memory-cap", type=str, help="of a rank, such as 16GiB: the quickest way to stay under it")
    parser.add_argument("--costs", type=str, help="with a cap: costs file with the times of stages and links")
    parser.add_argument("--vocabulary_size", type=int, help="token ids; that of data.tokenizer if not given (256)")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object and nothing else")
    return parser


def _bytes(what: str, text: str) -> float:
    """``"1.5GiB"`` -> 1610612736."""
    match = re.fullmatch(r"(\d+\.?\d*(?:e\d+)?)\s*([KMGT]?I?)B?", text.strip().upper().replace("E+", "E"), re.ASCII)
    if match is None and (match := re.fullmatch(r"(\d+\.?\d*E\d+)()", text.strip().upper(), re.ASCII)) is None:
        raise InputError(f"{what} {text}: write bytes, such as 8e9, 16GB or 16GiB")
    return float(match[1]) * _UNITS[match[2]]


def _vocabulary(config: TrainConfig, given: int | None) -> int:
    if given is None:
        from pipeloom.train.tokenize import load_tokenizer

        return load_tokenizer(config.data.tokenizer).vocabulary_size
    if given < 1:
        raise InputError(f"--vocabulary_size {given}: a model has at least one token id; raise it")
    return given


def _choose(config: TrainConfig, vocabulary: int, cap: float, costs_path: str | None) -> Choice:
    """The quickest granularity and recomputation under the cap; what the configuration says of both is left open."""
    from pipeloom.train.validate import make_schedule

    config = replace(config, memory=replace(config.memory, recompute="none"))
    schedule = make_schedule(config)
    model = planned_model(config, vocabulary, schedule.num_stages)
    costs = network = None
    if costs_path is not None:
        file = parse_costs(read_json_text("--costs", costs_path))
        size = 2 if config.number_format.has_masters else 4
        parameters = tuple(float(size * sum(layer.num_parameters for layer in stage)) for stage in model.stages)
        network = file.network
        costs = file.costs if file.costs.parameter_bytes else replace(file.costs, parameter_bytes=parameters)
    data = data_axis(config)
    moves = config.memory.offload_activations is not None
    if data is None or moves or not data.shards_gradients:
        return choose_recompute(planned_program(config, schedule), model, cap, costs=costs, network=network)
    return choose_memory(schedule, model, data, cap, costs=costs, network=network)


def _chosen(config: TrainConfig, choice: Choice) -> TrainConfig:
    """`config` with what was chosen."""
    kinds = [str(kind) for kind in choice.model.recompute]
    recompute = kinds[0] if len(set(kinds)) == 1 else ",".join(kinds)
    data = choice.program.data
    parallel = config.parallel
    if data is not None and data.shards_gradients:
        parallel = replace(parallel, data_granularity=data.granularity.value)
    return replace(config, parallel=parallel, memory=replace(config.memory, recompute=recompute))


def _print_plan(config: TrainConfig, vocabulary: int, choice: Choice | None, *, as_json: bool) -> None:
    copies = config.num_copies
    shown = [0, 1] if copies > 1 and config.parallel.data_strategy == "parameter-server" else [0]
    ranks = [rank for copy in shown for rank in planned_memory(config, vocabulary, copy=copy)]
    weights = {copy: copies - 1 if copy else 1 for copy in shown} if len(shown) > 1 else {0: copies}
    total = sum(weights[rank.copy] * rank.peak for rank in ranks)
    largest = max(ranks, key=lambda rank: rank.peak)
    chosen = None
    if choice is not None:
        chosen = {
            "data_granularity": config.parallel.data_granularity,
            "recompute": config.memory.recompute,
            "step_seconds": choice.seconds,
        }
    if as_json:
        answer: dict[str, Any] = {
            "ranks": [{"copy": r.copy, "rank": r.rank, **r.kinds, "peak": r.peak} for r in ranks],
            "copies": copies,
            "total": total,
            "largest_rank": largest.rank,
        }
        print(json.dumps(answer if chosen is None else {**answer, "chosen": chosen}, allow_nan=False))
        return
    names = {(r.copy, r.rank): f"rank {r.rank}" + (f", copy {r.copy}" if len(shown) > 1 else "") for r in ranks}
    table = [{"": names[r.copy, r.rank], **_texts(r.kinds), "at most at once": bytes_text(r.peak)} for r in ranks]
    _print_table(table)
    of = f", {copies} copies" if copies > 1 else ""
    most = f"{names[largest.copy, largest.rank]} takes most, {bytes_text(largest.peak)}"
    print(f"all ranks{of}: {bytes_text(total)}; {most}")
    if chosen is not None:
        granularity = chosen["data_granularity"]
        data = f"--parallel.data_granularity {granularity} " if granularity else ""
        print(f"under the cap with {data}--memory.recompute {chosen['recompute']}")


def _print_run(rows: Sequence[MemoryRow], *, as_json: bool) -> None:
    if as_json:
        processes = [
            {
                "process": row.process,
                "copy": row.copy,
                "rank": row.rank,
                "predicted": row.predicted,
                "measured": row.measured,
            }
            for row in rows
        ]
        print(json.dumps({"processes": processes}, allow_nan=False))
        return
    table = []
    for row in rows:
        for name, sizes in (("predicted", row.predicted), ("measured", row.measured)):
            first = f"process {row.process} (rank {row.rank}, copy {row.copy})" if name == "predicted" else ""
            kinds = {kind: size for kind, size in sizes.items() if kind != "peak"}
            peak = sizes.get("peak")
            most = "-" if peak is None else bytes_text(peak)
            table.append({"": first, " ": name, **_texts(kinds), "at most at once": most})
    _print_table(table)


def _texts(sizes: Mapping[str, float | None]) -> dict[str, str]:
    """Of every kind; those that are nowhere are left out of a table."""
    return {kind: "-" if sizes.get(kind) is None else bytes_text(sizes[kind] or 0) for kind in KINDS}


def _print_table(rows: Sequence[Mapping[str, str]]) -> None:
    columns = [name for name in rows[0] if any(row[name] not in ("0 B", "-") for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    for cells in ({name: name for name in columns}, *rows):
        line = "  ".join(f"{cells[n]:<{widths[n]}}" if not n.strip() else f"{cells[n]:>{widths[n]}}" for n in columns)
        print(line.rstrip())
