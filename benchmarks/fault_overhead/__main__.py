"""What watching for faults, and copies for recovery, cost a run of `pipeloom train` in which nothing fails."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.run_times import WARM_STEPS, timed_run
from benchmarks.common.statistics import ratio, spread

CASES = {
    "nothing": ("without the watchdog", ("--watchdog=off",)),
    "watchdog": ("watchdog, the default", ()),
    "copies": ("watchdog, and copies of states in memory of the launcher", ("--recover=true",)),
}
SIZES = {"4 x 256 tokens": (32, 256), "1 x 64 tokens": (8, 64)}  # samples per step and tokens of each, 8 micro-batches


def run(case: str, size: str, out: Path, steps: int) -> tuple[float, list[float]]:
    """Seconds per step of one run, with all between steps, and its losses."""
    samples, length = SIZES[size]
    options = {
        "output_dir": out, "steps": steps, "save_steps": 0, "eval_steps": 0, "sample_tokens": 0, "model.layers": 8,
        "model.width": 256, "model.heads": 8, "model.sequence_length": length, "batch.size": samples,
        "batch.microbatches": 8, "log_steps": steps,
    }  # fmt: skip
    words = [*(f"--{name}={value}" for name, value in options.items()), *CASES[case][1]]
    whole = timed_run(words, out.with_suffix(".record"), steps).whole
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return whole / (steps - WARM_STEPS), [row["loss"] for row in rows if "loss" in row]


def measure(size: str, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """For each case, the mean step of every round; ends the run where losses differ."""
    found: dict[str, list[float]] = {case: [] for case in CASES}
    for number in range(arguments.rounds):
        losses = []
        with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
            for case in [*CASES][:: 1 if number % 2 else -1]:  # who runs first changes
                seconds, of_run = run(case, size, Path(scratch, case), arguments.steps)
                found[case].append(seconds)
                losses.append(of_run)
        if any(each != losses[0] for each in losses):
            raise SystemExit("losses differ: nothing is reported")
    return found


def tables(results: dict[str, dict[str, list[float]]]) -> Parts:
    parts: list[str | Table] = []
    for size, found in results.items():
        rows = [
            (words, spread(found[case]).show("{:.1f}", 1e3), ratio(found[case], found["nothing"]).show("{:.3f}"))
            for case, (words, _) in CASES.items()
        ]
        parts += [f"### {size} per micro-batch", table(("run", "ms per step", "/ without the watchdog"), rows)]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "fault_overhead.json")
    arguments = parser.parse_args()
    machine: dict[str, Any] = environment()
    results = {size: measure(size, arguments) for size in arguments.sizes}
    parts = tables(results)
    print(markdown(parts))
    save(arguments.output, {"rounds": arguments.rounds, "steps": arguments.steps}, machine, results, parts)


if __name__ == "__main__":
    main()
