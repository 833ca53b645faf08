"""How close schedules come to theory when computing is waiting: K processes, F = 10 ms, B = 20 ms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, save, table
from benchmarks.common.statistics import spread
from benchmarks.common.systems import System
from benchmarks.common.waiting import BACKWARD_SECONDS, FORWARD_SECONDS, measure_waiting

SIZES = {4: 16, 8: 32, 16: 32}  # ranks: micro-batches
SYSTEMS = {
    "pipeloom 1f1b": System(kind="pipeloom", schedule="1f1b"),
    "torch 1f1b": System(kind="torch", schedule="1f1b"),
    "pipeloom gpipe": System(kind="pipeloom", schedule="gpipe"),
    "torch gpipe": System(kind="torch", schedule="gpipe"),
}


def theory_seconds(num_ranks: int, num_microbatches: int) -> float:
    """GPipe's and 1F1B's makespan for uniform stages: (M + K - 1) (F + B)."""
    return (num_microbatches + num_ranks - 1) * (FORWARD_SECONDS + BACKWARD_SECONDS)


def tables(results: dict[int, Any]) -> str:
    rows = []
    for num_ranks, result in results.items():
        theory = theory_seconds(num_ranks, result["num_microbatches"])
        for name, values in result["seconds"].items():
            rows.append(
                (
                    f"K={num_ranks} M={result['num_microbatches']}",
                    name,
                    f"{theory * 1e3:.0f}",
                    spread(values).show("{:.1f}", 1e3),
                    spread([100 * (value / theory - 1) for value in values]).show("{:.2f}"),
                    f"{result['errors'][name]:.0e}",
                )
            )
    bare = ", ".join(f"{result['bare_seconds'] * 1e3:.2f} ms (K={k})" for k, result in results.items())
    header = ("size", "system", "theory ms", "ms a step", "% over theory", "largest error")
    return f"{table(header, rows)}\n\nF + B of one stage alone took {bare} instead of 30 ms."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", nargs="+", type=int, choices=SIZES, default=list(SIZES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "emulated.json")
    arguments = parser.parse_args()
    machine = environment()
    results = {}
    for num_ranks in arguments.ranks:
        systems = {name: SYSTEMS[name] for name in arguments.systems}
        results[num_ranks] = measure_waiting(num_ranks, SIZES[num_ranks], systems, arguments.rounds)
        results[num_ranks]["num_microbatches"] = SIZES[num_ranks]
        print(tables({num_ranks: results[num_ranks]}), flush=True)
    save(arguments.output, {"rounds": arguments.rounds}, machine, results, tables(results))


if __name__ == "__main__":
    main()
