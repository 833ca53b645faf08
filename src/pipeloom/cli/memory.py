"""`pipeloom memory`: how much memory every rank takes, by kind, before a run or after it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeloom.cli.common.files import read_json
from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.train_options import make_parser, print_config, read_options, to_config
from pipeloom.common.quantities import bytes_text
from pipeloom.errors import InputError
from pipeloom.plan.memory import KINDS, Choice, MemoryRow, read_memory
from pipeloom.sim import parse_costs
from pipeloom.train.config.memory import chosen_words, planned_memory, under_cap
from pipeloom.train.config.train_config import TrainConfig

_DESCRIPTION = """\
How much memory every rank of a run takes, by kind, from closed forms: nothing is made, and nothing runs. The options
are those of `pipeloom train`, so that its command line can be pasted here. With --run, what a run took beside what was
predicted for it."""
_EXAMPLES = """
pipeloom memory --parallel.pipeline 4 --model.layers 24 --model.width 1024 --model.heads 16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --precision.dtype bf16
pipeloom memory --parallel.pipeline 2 --parallel.data 4 --parallel.data_strategy zero3 --memory.cap 24MiB
pipeloom memory --run runs/train
"""


def main(argv: Sequence[str]) -> int:
    """Print the table of a configuration, or of a run; returns the exit code."""
    parser = _parser()
    options = read_options(parser, argv)
    if options.run is not None:
        rows = read_memory(Path(options.run))
        _print_run(rows, as_json=options.json)
        return 0
    config = to_config(options.as_dict())
    if config.parallel.data == -1:
        raise InputError("parallel.data is -1: how many copies there are follows from a run's processes; give a number")
    from pipeloom.train.config.rules import validate_settings

    validate_settings(config)
    if options.print_config is not None:
        print_config(config, options.print_config)
        return 0
    vocabulary = _vocabulary(config, options.vocabulary_size)
    if options.costs is not None and config.memory.cap is None:
        raise InputError("--costs without --memory.cap: times weigh what a cap can cost; give a cap, or leave it out")
    file = None if options.costs is None else read_json("--costs", options.costs, parse_costs)
    config, choice = under_cap(config, vocabulary, file=file)
    _print_plan(config, vocabulary, choice, as_json=options.json)
    return 0


def _parser() -> Parser:
    parser = make_parser("pipeloom memory", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--run", type=str, help="output_dir of a run: what was predicted and measured there")
    parser.add_argument("--costs", type=str, help="with a cap: costs file with the times of stages and links")
    parser.add_argument("--vocabulary_size", type=int, help="token ids; that of data.tokenizer if not given (256)")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object and nothing else")
    return parser


def _vocabulary(config: TrainConfig, given: int | None) -> int:
    if given is None:
        from pipeloom.train.data.tokenizers import load_tokenizer

        return load_tokenizer(config.data.tokenizer).vocabulary_size
    if given < 1:
        raise InputError(f"--vocabulary_size {given}: a model has at least one token id; raise it")
    return given


def _print_plan(config: TrainConfig, vocabulary: int, choice: Choice | None, *, as_json: bool) -> None:
    copies = config.data_degree
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
        print(f"under the cap with {chosen_words(config)}")


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
