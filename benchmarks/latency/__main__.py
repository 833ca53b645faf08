"""What link latency costs each schedule: four ranks of waiting stages, one-way latencies of 0, 5 and 10 ms."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, save, table
from benchmarks.common.statistics import spread
from benchmarks.common.systems import System
from benchmarks.common.waiting import BACKWARD_SECONDS, FORWARD_SECONDS, measure_waiting

import pipeloom as pl

NUM_RANKS, NUM_MICROBATCHES = 4, 16
LATENCIES_SECONDS = (0.0, 0.005, 0.010)
TORCH = {f"torch {name}": System(kind="torch", schedule=name) for name in ("1f1b", "gpipe")}


def num_chunks(family: str) -> int:
    return pl.schedules.FAMILIES[family].default_chunks


def pipeloom_systems() -> dict[str, System]:
    """Every schedule that pipeloom has."""
    return {
        f"pipeloom {family}": System(kind="pipeloom", schedule=family, options={"num_chunks": num_chunks(family)})
        for family in pl.schedules.FAMILIES
    }


def with_latency(systems: dict[str, System], latency_seconds: float) -> dict[str, System]:
    return {
        f"{name} {latency_seconds * 1e3:g} ms": System(
            kind=system.kind, schedule=system.schedule, options=system.options, latency_seconds=latency_seconds
        )
        for name, system in systems.items()
    }


def predicted_seconds(family: str, latency_seconds: float) -> float:
    """The simulator's makespan for the same costs and latency."""
    schedule = pl.schedules.build(
        family, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES, num_chunks=num_chunks(family)
    )
    costs = pl.Costs.uniform(forward=FORWARD_SECONDS, backward=BACKWARD_SECONDS)
    return pl.simulate(schedule, costs, pl.Network(latency_seconds=latency_seconds)).makespan


def tables(results: dict[str, Any], names: list[str]) -> str:
    header = ["system"]
    for latency in LATENCIES_SECONDS:
        header += [f"{latency * 1e3:g} ms: measured", "simulated"]
    rows = []
    for name in names:
        row = [name]
        for latency in LATENCIES_SECONDS:
            row.append(spread(results["seconds"][f"{name} {latency * 1e3:g} ms"]).show("{:.0f}", 1e3))
            library, family = name.split(" ", 1)
            row.append(f"{predicted_seconds(family, latency) * 1e3:.0f}" if library == "pipeloom" else "")
        rows.append(row)
    return (
        f"{table(header, rows)}\n\nmilliseconds a step, median (quartiles); P={NUM_RANKS}, M={NUM_MICROBATCHES}; "
        f"1F1B and GPipe without latency in theory: {(NUM_MICROBATCHES + NUM_RANKS - 1) * 30} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    systems = {**pipeloom_systems(), **TORCH}
    parser.add_argument("--systems", nargs="+", choices=systems, default=list(systems))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "latency.json")
    arguments = parser.parse_args()
    machine = environment()
    chosen = {name: systems[name] for name in arguments.systems}
    delayed: dict[str, System] = {}
    for latency in LATENCIES_SECONDS:
        delayed |= with_latency(chosen, latency)
    results = measure_waiting(NUM_RANKS, NUM_MICROBATCHES, delayed, arguments.rounds)
    text = tables(results, list(chosen))
    print(text)
    settings = {"rounds": arguments.rounds, "num_ranks": NUM_RANKS, "num_microbatches": NUM_MICROBATCHES}
    save(arguments.output, settings, machine, results, text)


if __name__ == "__main__":
    main()
