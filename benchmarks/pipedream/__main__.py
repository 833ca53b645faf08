"""How close streams come to one micro-batch per slowest stage, beside 1F1B that flushes, when computing is waiting."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import spread
from benchmarks.pipedream.subject import Cell, Subject, run

import pipeloom as pl
from pipeloom.schedules import pipedream, pipedream_2bw

NUM_RANKS = 4
# Replicas of each stage, and how much work the stage has: that all ranks have as much to do.
REPLICATED = ((2, 1), (1, 2), (2, 1, 1), (1, 2, 1), (3, 1))


def cells(num_microbatches: int, milliseconds: float) -> dict[str, Cell]:
    """What is measured, by name; streams of `num_microbatches`, of which one takes a rank so long."""
    seconds = milliseconds / 1e3
    sizes: dict[str, Any] = {"num_ranks": NUM_RANKS, "num_microbatches": num_microbatches}
    even = (seconds,) * NUM_RANKS
    flushed = pl.schedules.one_f_one_b(num_ranks=NUM_RANKS, num_microbatches=2 * NUM_RANKS)
    found = {
        "1f1b, flushed after 8": Cell(flushed, even, 1 + num_microbatches // (2 * NUM_RANKS)),
        "pipedream stash": Cell(pipedream(**sizes), even, num_microbatches),
        "pipedream vertical": Cell(pipedream(**sizes, weights="vertical"), even, num_microbatches),
        "pipedream-2bw of 4": Cell(
            pipedream_2bw(**sizes, microbatches_per_update=NUM_RANKS), even, num_microbatches // NUM_RANKS
        ),
    }
    for replicas in REPLICATED:
        # Where work comes back to a single rank from replicas, one more in flight covers that they take turns.
        more = 1 if replicas == (1, 2, 1) else 0
        count = sum(replicas)
        sizes = {"num_ranks": count, "num_microbatches": num_microbatches, "replicas": replicas}
        schedule = pipedream(**sizes, in_flight=-(-count // replicas[0]) + more)
        found[f"1F1B-RR {replicas}"] = Cell(schedule, tuple(seconds * r for r in replicas), num_microbatches)
    return {f"{name}, {milliseconds:g} ms": cell for name, cell in found.items()}


def measure(chosen: dict[str, Cell], rounds: int) -> dict[str, Any]:
    """Every cell in turn, round after round, in as many processes as it has ranks.

    The weights are compared first with those of all ranks in one process, without waits.
    """
    results: dict[str, Any] = {}
    answers: dict[str, list[list[Any]]] = defaultdict(list)
    urgent = True
    for num_ranks in sorted({cell.schedule.num_ranks for cell in chosen.values()}):
        with Crew(f"{num_ranks} ranks", num_ranks, Subject) as crew:
            of_size = {name: cell for name, cell in chosen.items() if cell.schedule.num_ranks == num_ranks}
            for round_number in range(rounds):
                urgent &= all(crew.call("run_first"))
                for name, cell in of_size.items():
                    answers[name].append(crew.call("run", cell))
                print(f"{num_ranks} ranks: round {round_number + 1} of {rounds}", file=sys.stderr, flush=True)
    for name, cell in chosen.items():
        expected = run(cell, waits=False, transport="loopback").weights
        for answer in (answer for of_round in answers[name] for answer in of_round):
            if any(expected[key] != value for key, value in answer.weights.items()):
                raise SystemExit(f"{name}: the weights differ from those of one process")
        results[name] = {
            "ideal_seconds": cell.ideal_seconds,
            "period_seconds": [max(answer.period_seconds for answer in of_round) for of_round in answers[name]],
            "versions": [answer.versions for answer in answers[name][0]],
            "version_bytes": [answer.version_bytes for answer in answers[name][0]],
            "predicted_versions": pl.check(cell.schedule).weight_versions,
            "urgent": urgent,
        }
    return results


def tables(results: dict[str, Any]) -> Parts:
    header = (
        "schedule, stages of", "ms a micro-batch", "ms over the stage", "% of one per slowest stage", "versions held",
        "predicted",
    )  # fmt: skip
    rows: list[Sequence[object]] = []
    for name, result in results.items():
        ideal, periods = result["ideal_seconds"], result["period_seconds"]
        share = spread([100 * ideal / period for period in periods])
        over = spread([period - ideal for period in periods])
        versions = (" ".join(map(str, result[key])) for key in ("versions", "predicted_versions"))
        times = spread(periods).show("{:.2f}", 1e3), over.show("{:.2f}", 1e3)
        rows.append((name, *times, share.show("{:.1f}"), *versions))
    return [table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipedream", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, default=96, help="of a stream; a multiple of 24, at least 72")
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[30.0, 60.0], help="of F and B on a rank")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "pipedream.json")
    arguments = parser.parse_args()
    machine = environment()
    every = [cells(arguments.microbatches, milliseconds) for milliseconds in arguments.milliseconds]
    results = measure({name: cell for of_length in every for name, cell in of_length.items()}, arguments.rounds)
    print(markdown(tables(results)))
    settings = {name: getattr(arguments, name) for name in ("rounds", "microbatches", "milliseconds")}
    save(arguments.output, settings, machine, results, tables(results))


if __name__ == "__main__":
    main()
