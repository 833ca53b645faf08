"""Every schedule in real processes whose computing is waiting, beside the simulator's prediction and torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.peers import TORCH_SCHEDULES
from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.common.waiting import measure_waiting, simulated, waiting_schedule, waiting_systems
from benchmarks.emulated import slices

from pipeloom.schedules import SYNCHRONOUS

SIZES = {4: 8, 8: 16, 16: 32}  # ranks: micro-batches; the fewest that all schedules have


def measure(num_ranks: int, names: list[str], num_rounds: int) -> dict[str, Any]:
    num_microbatches = SIZES[num_ranks]
    result = measure_waiting(
        num_ranks, num_microbatches, waiting_systems(names, num_ranks, num_microbatches), num_rounds
    )
    plans = {name: waiting_schedule(name, num_ranks, num_microbatches) for name in names}
    predicted = {name: simulated(schedule) for name, schedule in plans.items()}
    message_seconds = median(result["message_seconds"])
    result["num_microbatches"] = num_microbatches
    result["simulated_seconds"] = {name: timeline.makespan for name, timeline in predicted.items()}
    result["simulated_bubbles"] = {name: timeline.bubble_fraction for name, timeline in predicted.items()}
    with_messages = {name: simulated(schedule, message_seconds) for name, schedule in plans.items()}
    result["simulated_seconds_with_messages"] = {name: each.makespan for name, each in with_messages.items()}
    result["simulated_bubbles_with_messages"] = {name: each.bubble_fraction for name, each in with_messages.items()}
    return result


def percent_over(seconds: list[float], theory: float) -> str:
    return spread([100 * (value / theory - 1) for value in seconds]).show("{:.1f}")


def tables(results: dict[int, Any]) -> Parts:
    """For each size a table: times and bubbles, simulated and measured, and torch's."""
    header = (
        "schedule",
        "simulated ms",
        "measured ms",
        "% over simulated",
        "pipes, % over simulated",
        "measured / pipes",
        "% over it with messages",
        "simulated bubble %",
        "measured bubble %",
        "points apart",
        "simulated with messages",
        "points apart",
        "torch ms",
        "% over simulated",
        "pipeloom / torch",
    )
    parts: list[str | Table] = []
    for num_ranks, result in results.items():
        rows = []
        for name, theory in result["simulated_seconds"].items():
            own, bubble = result["seconds"][f"pipeloom {name}"], result["simulated_bubbles"][name]
            bubbles = spread(result["bubbles"][f"pipeloom {name}"])
            row = [name, f"{theory * 1e3:.0f}", spread(own).show("{:.1f}", 1e3)]
            pipes, with_messages = result["seconds"][f"pipes {name}"], result["simulated_seconds_with_messages"][name]
            row += [percent_over(own, theory), percent_over(pipes, theory), ratio(own, pipes).show("{:.3f}")]
            row.append(percent_over(own, with_messages))
            row += [f"{100 * bubble:.1f}", bubbles.show("{:.1f}", 100), f"{100 * (bubbles.median - bubble):+.1f}"]
            bubble = result["simulated_bubbles_with_messages"][name]
            row += [f"{100 * bubble:.1f}", f"{100 * (bubbles.median - bubble):+.1f}"]
            if name in TORCH_SCHEDULES:
                peer = result["seconds"][f"torch {name}"]
                row.append(spread(peer).show("{:.1f}", 1e3))
                row.append(percent_over(peer, theory))
                row.append(ratio(own, peer).show("{:.3f}"))
            rows.append(row + [""] * (len(header) - len(row)))
        worst, messages = max(result["errors"].values()), spread(result["message_seconds"])
        parts += [f"### {num_ranks} ranks, {result['num_microbatches']} micro-batches", table(header, rows)]
        parts.append(
            f"A message by itself took {messages.show('{:.2f}', 1e3)} ms, F and B of one stage alone "
            f"{result['bare_seconds'] * 1e3:.2f} ms instead of 30 ms; the largest error of a loss or gradient is "
            f"{worst:.0e}. The processes "
            f"{'ran' if result['urgent'] else 'could not be made to run'} before all others of the machine."
        )
    return parts


def headlines(results: dict[int, Any]) -> dict[str, Spread]:
    """Step time over the simulated one, and over that of the same program over plain pipes."""
    found = {}
    for num_ranks, result in results.items():
        for name, theory in result["simulated_seconds"].items():
            own, pipes = result["seconds"][f"pipeloom {name}"], result["seconds"][f"pipes {name}"]
            found[f"{num_ranks} ranks: {name}, measured / simulated"] = spread([value / theory for value in own])
            found[f"{num_ranks} ranks: {name}, measured / pipes"] = ratio(own, pipes)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.emulated", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, choices=SIZES, default=[4, 8])
    parser.add_argument("--slices", action="store_true", help="sequences cut into slices, on 8 ranks, instead")
    parser.add_argument("--schedules", nargs="+", choices=SYNCHRONOUS, default=list(SYNCHRONOUS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "emulated.json")
    arguments = parser.parse_args()
    machine = environment()
    if arguments.slices:
        sliced = {count: slices.measure(count, arguments.rounds) for count in slices.MICROBATCHES}
        print(markdown(slices.tables(sliced)))
        output = arguments.output.with_stem(f"{arguments.output.stem}_slices")
        save(output, {"rounds": arguments.rounds}, machine, sliced, slices.tables(sliced))
        return
    results = {}
    for num_ranks in arguments.ranks:
        results[num_ranks] = measure(num_ranks, arguments.schedules, arguments.rounds)
        print(markdown(tables({num_ranks: results[num_ranks]})), flush=True)
    save(arguments.output, {"rounds": arguments.rounds}, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
