"""Bytes of a training state per process: plain data parallelism and ZeRO under a pipeline, beside their formulas."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.report import environment, save, table
from benchmarks.common.workloads import GPTWorkload
from benchmarks.memory.subject import KINDS, Holder, Layout, Report

NUM_PROCESSES = 4
WORKLOAD = GPTWorkload(micro_batch=1, sequence_length=32, num_microbatches=16)
# Bytes a parameter of one of d copies, ZeRO (arXiv:1910.02054, section 3.1 and figure 1): 16-bit parameters and
# gradients, and 12 bytes of float32 master and Adam's two moments.
FORMULAS: dict[str, tuple[str, Callable[[int], float]]] = {
    "ddp": ("16 N", lambda d: 16),
    "zero1": ("4 N + 12 N/d", lambda d: 4 + 12 / d),
    "zero2": ("2 N + 14 N/d", lambda d: 2 + 14 / d),
    "zero3": ("16 N/d", lambda d: 16 / d),
}
MESHES = ((4, 1), (2, 2), (1, 4))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipev")


def state_rows(crew: Crew) -> list[dict[str, Any]]:
    """Every strategy on every mesh."""
    rows = []
    for pp, dp in MESHES:
        for strategy, (formula, bytes_a_parameter) in FORMULAS.items():
            reports: list[Report] = crew.call("measure", WORKLOAD, Layout(pp, dp, strategy))
            for report in reports:
                held = {kind: size / report.num_parameters for kind, size in report.held.items()}
                total = sum(held[kind] for kind in KINDS)
                rows.append(
                    {
                        "pp": pp,
                        "dp": dp,
                        "strategy": strategy,
                        "formula": formula,
                        "expected": bytes_a_parameter(dp),
                        "held": held,
                        "total": total,
                        "most": report.most / report.num_parameters,
                        "num_parameters": report.num_parameters,
                    }
                )
            print(f"PP{pp} x DP{dp} {strategy}: {_deviation(rows[-1]):+.1f} %", flush=True)
    return rows


def activation_rows(crew: Crew) -> list[dict[str, Any]]:
    """Activations held at once under every schedule, on PP2 x DP2 with parameters gathered for every computation."""
    rows = []
    for schedule in SCHEDULES:
        layout = Layout(2, 2, "zero3", "microbatch", schedule)
        reports: list[Report] = crew.call("measure", WORKLOAD, layout)
        rows.append({"schedule": schedule, "held, simulated": [report.live_activations for report in reports]})
    return rows


def _deviation(row: dict[str, Any]) -> float:
    """Of what is held from the formula, in percent."""
    return 100 * float(row["total"] / row["expected"] - 1)


def tables(states: list[dict[str, Any]], activations: list[dict[str, Any]]) -> str:
    """One row for each strategy and mesh: the process that is furthest from the formula."""
    worst: dict[tuple[int, int, str], dict[str, Any]] = {}
    for row in states:
        key = row["pp"], row["dp"], row["strategy"]
        if key not in worst or abs(_deviation(row)) > abs(_deviation(worst[key])):
            worst[key] = row
    rows = [
        (
            f"PP{row['pp']} x DP{row['dp']} {row['strategy']}",
            row["formula"],
            f"{row['expected']:.2f}",
            f"{row['total']:.2f}",
            f"{_deviation(row):+.1f} %",
            *(f"{row['held'][kind]:.2f}" for kind in (*KINDS, "other")),
            f"{row['most']:.2f}",
        )
        for row in worst.values()
    ]
    header = (
        "bytes a parameter",
        "formula",
        "is",
        "held",
        "off by",
        *KINDS,
        "other",
        "at most in a step, without optimizer",
    )
    text = table(header, rows)
    rows = [
        (row["schedule"], *(f"{held}, {foreseen}" for held, foreseen in row["held, simulated"])) for row in activations
    ]
    header = ("live activations: held, simulated", *(f"process {rank}" for rank in range(NUM_PROCESSES)))
    return text + "\n\n" + table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    arguments = parser.parse_args()
    machine = environment()
    with Crew("memory", NUM_PROCESSES, Holder) as crew:
        states = state_rows(crew)
        activations = activation_rows(crew)
    text = tables(states, activations)
    print("\n" + text)
    save(arguments.output, {"workload": str(WORKLOAD)}, machine, {"states": states, "activations": activations}, text)
    off = [row for row in states if abs(_deviation(row)) > 5]
    assert not off, f"off by more than 5 %: {[(row['pp'], row['dp'], row['strategy'], _deviation(row)) for row in off]}"
    assert all(held == foreseen for row in activations for held, foreseen in row["held, simulated"])


if __name__ == "__main__":
    main()
