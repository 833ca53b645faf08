"""What link latency costs each schedule: four ranks of waiting stages, one-way latencies of 0, 5 and 10 ms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import spread
from benchmarks.common.systems import System
from benchmarks.common.waiting import measure_waiting, simulated, waiting_systems

from pipeloom.ir import Schedule
from pipeloom.schedules import SYNCHRONOUS

NUM_RANKS, NUM_MICROBATCHES = 4, 16


def label(name: str, latency_ms: float) -> str:
    return f"{name} {latency_ms:g} ms"


def tables(results: dict[str, Any], names: list[str], latencies_ms: list[float]) -> Parts:
    """One row for each schedule, three columns for each latency."""
    header = ["schedule"]
    for latency in latencies_ms:
        header += [f"{latency:g} ms: simulated", "measured", "% over", "torch"]
    rows = []
    for name in names:
        row = [name]
        for latency in latencies_ms:
            own, peer = (results["seconds"].get(label(f"{who} {name}", latency)) for who in ("pipeloom", "torch"))
            theory = results["simulated_seconds"][label(name, latency)]
            measured = spread(own)
            row += [f"{theory * 1e3:.0f}", measured.show("{:.0f}", 1e3)]
            row += [f"{100 * (measured.median / theory - 1):.1f}", spread(peer).show("{:.0f}", 1e3) if peer else ""]
        rows.append(row)
    note = (
        f"Milliseconds per step, median (quartiles); P={NUM_RANKS}, M={NUM_MICROBATCHES}; "
        f"without a bubble {NUM_MICROBATCHES * 30} ms."
    )
    return [table(header, rows), note]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--latency", nargs="+", type=float, default=[0, 5, 10], help="one-way, in milliseconds")
    parser.add_argument("--schedules", nargs="+", choices=SYNCHRONOUS, default=list(SYNCHRONOUS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "latency.json")
    arguments = parser.parse_args()
    names, latencies = arguments.schedules, arguments.latency
    machine = environment()
    systems: dict[str, System] = {}
    predicted = {}
    for latency in latencies:
        found = waiting_systems(names, NUM_RANKS, NUM_MICROBATCHES, latency / 1e3)
        systems |= {label(name, latency): system for name, system in found.items()}
        for name in names:
            schedule = found[f"pipeloom {name}"].schedule
            assert isinstance(schedule, Schedule)
            predicted[label(name, latency)] = simulated(schedule, latency / 1e3).makespan
    results = measure_waiting(NUM_RANKS, NUM_MICROBATCHES, systems, arguments.rounds)
    results["simulated_seconds"] = predicted
    parts = tables(results, names, latencies)
    print(markdown(parts))
    settings = {"rounds": arguments.rounds, "num_ranks": NUM_RANKS, "num_microbatches": NUM_MICROBATCHES}
    save(arguments.output, settings, machine, results, parts)


if __name__ == "__main__":
    main()
