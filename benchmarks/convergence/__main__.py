"""Loss against tokens and against time: 1F1B with a flush, PipeDream and PipeDream-2BW, the same budget for all."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import spread

SYSTEMS = {
    "1f1b": ("--schedule=1f1b",),
    "pipedream": ("--schedule=pipedream",),
    "pipedream, vertical": ("--schedule=pipedream", "--weights=vertical"),
    "pipedream-2bw": ("--schedule=pipedream-2bw",),
}


def train(name: str, seed: int, options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run of the main job; what its metrics say."""
    words = [
        f"--steps={options.steps}", f"--seed={seed}", f"--parallel.pipeline={options.ranks}", "--sample_tokens=0",
        f"--output_dir={directory}", f"--eval_steps={options.eval_steps}", "--save_steps=0",
    ]  # fmt: skip
    command = [sys.executable, "-m", "pipeloom", "train", *words, *SYSTEMS[name], *options.train]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    return {
        "losses": [row["loss"] for row in steps],
        "step_seconds": [row["step_seconds"] for row in steps],
        "tokens_a_step": round(steps[-1]["tokens_per_second"] * steps[-1]["step_seconds"]),
        "evaluations": [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row],
    }


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """For each system, a run for each seed; the systems take turns."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in options.systems}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        for seed in range(options.seeds):
            for number, name in enumerate(options.systems):
                results[name].append(train(name, seed, options, Path(scratch) / f"{seed}-{number}"))
                print(f"seed {seed}, {name}: validation loss {results[name][-1]['evaluations'][-1][1]:.4f}", flush=True)
    return results


def curves(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """For each system the validation loss by tokens and by seconds of training: means over the seeds."""
    found = {}
    for name, runs in results.items():
        steps = [step for step, _ in runs[0]["evaluations"]]
        seconds = [[sum(run["step_seconds"][:step]) for step in steps] for run in runs]
        losses = [[loss for _, loss in run["evaluations"]] for run in runs]
        found[name] = {
            "tokens": [step * runs[0]["tokens_a_step"] for step in steps],
            "seconds": [round(statistics.fmean(values), 3) for values in zip(*seconds, strict=True)],
            "loss": [round(statistics.fmean(values), 4) for values in zip(*losses, strict=True)],
        }
    return found


def tables(results: dict[str, list[dict[str, Any]]]) -> Parts:
    """What each reached, and when it was where 1F1B ended."""
    goal = statistics.median(run["evaluations"][-1][1] for run in next(iter(results.values())))
    first = next(iter(results))
    header = ("schedule", "validation loss at the end", "ms a step", f"steps to {first}'s end", "seconds to it")
    rows = []
    for name, runs in results.items():
        final = spread([run["evaluations"][-1][1] for run in runs])
        pace = spread([statistics.median(run["step_seconds"]) for run in runs])
        known = [step for run in runs if (step := _first_at(run["evaluations"], goal)) is not None]
        seconds = [_seconds_to(run, step) for run in runs if (step := _first_at(run["evaluations"], goal)) is not None]
        steps = statistics.median(known) if 2 * len(known) > len(runs) else None
        rows.append(
            (
                name, final.show("{:.4f}"), pace.show("{:.0f}", 1e3),
                "not reached" if steps is None else f"{steps:.0f}",
                "" if steps is None else f"{statistics.median(seconds):.1f}",
            )
        )  # fmt: skip
    return [table(header, rows)]


def _seconds_to(run: dict[str, Any], step: float) -> float:
    """Seconds of training until `step`, drains included."""
    whole = int(step)
    return sum(run["step_seconds"][:whole]) + (step - whole) * sum(run["step_seconds"][whole : whole + 1])


def _first_at(evaluations: Sequence[tuple[int, float]], goal: float) -> float | None:
    """The step at which the loss was down to `goal`, on straight lines between evaluations."""
    before: tuple[int, float] | None = None
    for step, loss in evaluations:
        if loss <= goal:
            if before is None or loss == before[1]:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - goal) / (before[1] - loss)
        before = (step, loss)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eval-steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument(
        "--train", nargs="*", default=[], help="more options of `pipeloom train`, such as --train=--x=1"
    )
    parser.add_argument("--curves", type=Path, help="write the curves here too, for the picture of the documentation")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "convergence.json")
    options = parser.parse_args()
    machine = environment()
    results = measure(options)
    parts = tables(results)
    print(markdown(parts))
    settings = {"seeds": options.seeds, "steps": options.steps, "ranks": options.ranks, "train": options.train}
    save(options.output, settings, machine, results, parts)
    if options.curves is not None:
        options.curves.write_text(json.dumps(curves(results), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
