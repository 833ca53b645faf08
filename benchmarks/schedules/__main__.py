"""The same GPT under the same schedules in pipeloom and in torch.distributed.pipelining, on 2 and 4 processes."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.peers import TORCH_SCHEDULES
from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.common.systems import Bench, System, build_checked, step_seconds
from benchmarks.common.workloads import GPTWorkload

WORKLOAD = GPTWorkload(micro_batch=1, sequence_length=64, num_microbatches=8)
LIBRARIES = ("pipeloom", "torch")


def measure(num_ranks: int, names: list[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Schedule by schedule, rounds of both libraries in turn, each in processes of its own.

    The time of a library in a round is the median of its steps there.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        reference = Path(scratch) / "reference.safetensors"
        write_reference(WORKLOAD, reference)
        with (
            Crew("pipeloom", num_ranks, Bench, num_ranks, scratch) as own,
            Crew("torch", num_ranks, Bench, num_ranks, scratch) as peer,
        ):
            crews = dict(zip(LIBRARIES, (own, peer), strict=True))
            for name in names:
                errors = {
                    kind: build_checked(crew, name, System(kind=kind, schedule=name), WORKLOAD, reference)
                    for kind, crew in crews.items()
                }
                seconds: dict[str, list[float]] = {kind: [] for kind in LIBRARIES}
                for round_number in range(num_rounds):
                    for kind in LIBRARIES if round_number % 2 else reversed(LIBRARIES):
                        # One step first, untimed: its caches were used by the other since its last turn.
                        stamps = crews[kind].call("run_steps", name, 1 + num_steps)
                        seconds[kind].append(spread(step_seconds(stamps)[1:]).median)
                results[name] = {"errors": errors, "seconds": seconds}
                print(f"P={num_ranks} {name}: {ratio(*seconds.values()).show('{:.3f}')}", flush=True)
    return results


def tables(results: dict[int, Any]) -> Parts:
    """One row for each schedule, for each number of processes."""
    rows = []
    for num_ranks, by_schedule in results.items():
        for name, result in by_schedule.items():
            own, peer = (result["seconds"][kind] for kind in LIBRARIES)
            row = [f"P={num_ranks} {name}", TORCH_SCHEDULES[name]]
            row += [spread(own).show("{:.1f}", 1e3), spread(peer).show("{:.1f}", 1e3), ratio(own, peer).show("{:.3f}")]
            rows.append([*row, *(f"{result['errors'][kind]:.0e}" for kind in LIBRARIES)])
    header = ("schedule", "torch's", "pipeloom, ms a step", "torch", "pipeloom / torch", "error: pipeloom", "torch")
    return [table(header, rows)]


def headlines(results: dict[int, Any]) -> dict[str, Spread]:
    """Ratios for the README: step time, pipeloom over torch."""
    return {
        f"{num_ranks} ranks: {name}": ratio(*(result["seconds"][kind] for kind in LIBRARIES))
        for num_ranks, by_schedule in results.items()
        for name, result in by_schedule.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.schedules", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a library in a round")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=TORCH_SCHEDULES, default=list(TORCH_SCHEDULES))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "schedules.json")
    arguments = parser.parse_args()
    machine = environment()
    results = {}
    for num_ranks in arguments.ranks:
        results[num_ranks] = measure(num_ranks, arguments.schedules, arguments.rounds, arguments.steps)
        print(f"\n{markdown(tables({num_ranks: results[num_ranks]}))}\n", flush=True)
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "workload": str(WORKLOAD)}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
