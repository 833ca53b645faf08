"""How long steps in a row take with a barrier at the optimizer and without one, when computing is waiting."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.barrier_free.subject import (
    NUM_MICROBATCHES,
    NUM_RANKS,
    SECONDS,
    SYSTEMS,
    Answer,
    Subject,
)
from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import spread

import pipeloom as pl
from pipeloom.passes import repeat_steps

SCHEDULES = ("1f1b", "zb-h1", "zb-h2", "zb-v")
STEPS_IN_A_ROW = 6


def check(answers: dict[str, Sequence[Answer]], num_steps: int) -> None:
    """Weights are those behind a barrier, and the steps that should have been done again were."""
    if [a.weights for a in answers["barrier"]] != [a.weights for a in answers["validated later"]]:
        raise SystemExit("the weights differ from those with a barrier")
    repeats = {name: {answer.num_repeats for answer in found} for name, found in answers.items()}
    expected = {"barrier": {0}, "validated later": {0}, "validated later, always wrong": {num_steps + 2}}
    if repeats != {name: expected[name] for name in answers}:
        raise SystemExit(f"steps were done again {repeats} times, not {expected}")


def theory_seconds(name: str) -> dict[str, float]:
    """Seconds of a step: alone, the largest span of a rank, and of many in a row."""
    schedule = pl.schedules.build(name, num_ranks=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    chunks, (forward, backward, weight) = schedule.placement.num_chunks, SECONDS
    costs = pl.Costs(
        forward=(forward / chunks,) * schedule.num_stages,
        backward_input=(backward / chunks,) * schedule.num_stages,
        backward_weight=(weight / chunks,) * schedule.num_stages,
    )
    alone = pl.simulate(schedule, costs)
    row = pl.simulate(repeat_steps(schedule, 11), costs)
    return {
        "makespan": alone.makespan,
        "span": alone.span_seconds,
        "in a row": (row.makespan - alone.makespan) / 10,
    }


def measure(names: Sequence[str], rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: {"theory": theory_seconds(name), "seconds": {}} for name in names}
    with Crew("barrier-free", NUM_RANKS, Subject) as crew:
        for _ in range(rounds):
            for name in names:
                answers = {system: crew.call("run", name, system, STEPS_IN_A_ROW) for system in SYSTEMS}
                check(answers, STEPS_IN_A_ROW)
                for system, found in answers.items():
                    results[name]["seconds"].setdefault(system, []).append(found[0].seconds_a_step)
    return results


def tables(results: dict[str, Any]) -> Parts:
    header = ("schedule", "step", "theory ms", "ms a step", "over the barrier's")
    rows = []
    for name, result in results.items():
        theory, seconds = result["theory"], result["seconds"]
        for system, values in seconds.items():
            expected = {"barrier": theory["makespan"], "validated later": theory["in a row"]}.get(system)
            ratio = spread([a / b for a, b in zip(values, seconds["barrier"], strict=True)])
            shown = f"{expected * 1e3:.0f}" if expected else ""
            rows.append((name, system, shown, spread(values).show("{:.1f}", 1e3), ratio.show("{:.3f}")))
    return [table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.barrier_free", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "barrier_free.json")
    arguments = parser.parse_args()
    machine = environment()
    results = measure(arguments.schedules, arguments.rounds)
    print(markdown(tables(results)))
    save(arguments.output, {"rounds": arguments.rounds, "steps": STEPS_IN_A_ROW}, machine, results, tables(results))


if __name__ == "__main__":
    main()
