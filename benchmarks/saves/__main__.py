"""What a checkpoint costs a run of `pipeloom train`: written between two steps, and in the background."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.run_times import Times, timed_run
from benchmarks.common.statistics import ratio, spread

from pipeloom.train.checkpoint.manifest import verify

CASES = {"none": "without checkpoints", "between": "between steps", "background": "in the background"}


def run(case: str, out: Path, arguments: argparse.Namespace) -> Times:
    """One run, whose ranks record when phases begin."""
    record, every = out.with_suffix(".record"), 0 if case == "none" else arguments.save_steps
    options = {
        "output_dir": out, "steps": arguments.steps, "save_steps": every, "save_total_limit": "null", "eval_steps": 0,
        "sample_tokens": 0, "model.layers": arguments.layers, "model.width": arguments.width, "model.heads": 4,
        "model.sequence_length": 256, "batch.size": 16, "batch.microbatches": 4,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items()]
    if case == "background":
        words.append("--background_saves=true")
    return timed_run(words, record, arguments.steps)


def check(directory: Path) -> None:
    """Raises where losses or checkpoints differ."""
    losses = {
        case: [json.loads(line)["loss"] for line in (directory / case / "metrics.jsonl").read_text().splitlines()]
        for case in CASES
    }
    assert len(set(map(tuple, losses.values()))) == 1, "losses differ"
    for path in (directory / "between").glob("checkpoint-*"):
        found = [
            {
                name: record.sha256
                for name, record in verify(directory / case / path.name).files.items()
                if "-of-" in name
            }
            for case in ("between", "background")
        ]
        assert found[0] == found[1], f"{path.name} differs"


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """For each case, the times of every round."""
    found: dict[str, list[Times]] = {case: [] for case in CASES}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
            for case in CASES:
                found[case].append(run(case, Path(scratch, case), arguments))
            check(Path(scratch))
    return {
        case: {name: [getattr(each, name) for each in times] for name in Times._fields} for case, times in found.items()
    }


def tables(results: dict[str, Any], arguments: argparse.Namespace) -> Parts:
    rows, plain = [], results["none"]
    saves = (arguments.steps - 1) // arguments.save_steps
    for case in ("between", "background"):
        result = results[case]
        stalls = [statistics.median(each) for each in result["stalls"]]
        whole = [
            (mine - none) / saves / step
            for mine, none, step in zip(result["whole"], plain["whole"], plain["step"], strict=True)
        ]
        rows.append(
            (
                CASES[case],
                spread(stalls).show("{:.1f}", 1e3),
                ratio(stalls, plain["step"]).show("{:.1%}"),
                spread(whole).show("{:.1%}"),
            )
        )
    header = ("checkpoints", "stall, ms", "stall / step", "whole cost / step")
    step = spread(plain["step"]).show("{:.0f}", 1e3)
    size = f"width {arguments.width}, {arguments.layers} layers, 16 x 256 tokens"
    return [table(header, rows), f"GPT with {size}, 2 ranks; a step takes {step} ms. Median (quartiles) over rounds."]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saves", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save_steps", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "saves.json")
    arguments = parser.parse_args()
    machine, results = environment(), measure(arguments)
    parts = tables(results, arguments)
    print(markdown(parts))
    settings = {name: getattr(arguments, name) for name in ("rounds", "steps", "save_steps", "width", "layers")}
    save(arguments.output, settings, machine, results, parts)


if __name__ == "__main__":
    main()
