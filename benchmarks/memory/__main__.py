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
WORKLOAD = GPTWorkload(micro_batch=1, sequence_length=8, num_microbatches=16)
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
    """Every strategy on every mesh, each with the reports of all processes."""
    rows = []
    for pp, dp in MESHES:
        for strategy in FORMULAS:
            for granularity in ("step", "microbatch") if strategy in ("zero2", "zero3") else ("step",):
                layout = Layout(pp, dp, strategy, granularity)
                reports: list[Report] = crew.call("measure", WORKLOAD, layout)
                rows.append({**layout._asdict(), "reports": [report._asdict() for report in reports]})
                print(f"PP{pp} x DP{dp} {strategy} {granularity}: {_deviation(rows[-1]):+.1f} %", flush=True)
    return rows


def activation_rows(crew: Crew) -> list[dict[str, Any]]:
    """Activations held at once under every schedule, on PP2 x DP2 with parameters gathered for every computation."""
    rows = []
    for schedule in SCHEDULES:
        layout = Layout(2, 2, "zero3", "microbatch", schedule)
        reports: list[Report] = crew.call("measure", WORKLOAD, layout)
        rows.append({"schedule": schedule, "held, simulated": [report.live_activations for report in reports]})
    return rows


def _expected(row: dict[str, Any]) -> float:
    return FORMULAS[row["strategy"]][1](row["dp"])


def _held(report: dict[str, Any]) -> float:
    """Bytes a parameter of one process, of all kinds that the formulas have."""
    return float(sum(report["held"][kind] for kind in KINDS) / report["num_parameters"])


def _deviation(row: dict[str, Any]) -> float:
    """Of the process furthest from the formula, in percent; see the README for zero1."""
    expected = _expected(row)
    found = [_held(report) for report in row["reports"]]
    if row["strategy"] == "zero1":
        found = [report["most"] / report["num_parameters"] for report in row["reports"]]
    return max((100 * (value / expected - 1) for value in found), key=abs)


def tables(states: list[dict[str, Any]], activations: list[dict[str, Any]]) -> str:
    """One row for each strategy and mesh: the process that holds most."""
    rows = []
    for row in states:
        report = max(row["reports"], key=_held)
        a_parameter = {kind: size / report["num_parameters"] for kind, size in report["held"].items()}
        rows.append(
            (
                f"PP{row['pp']} x DP{row['dp']} {row['strategy']}, {row['granularity']}",
                FORMULAS[row["strategy"]][0],
                f"{_expected(row):.2f}",
                f"{_held(report):.2f}",
                f"{max(r['most'] / r['num_parameters'] for r in row['reports']):.2f}",
                f"{_deviation(row):+.1f} %",
                *(f"{a_parameter[kind]:.2f}" for kind in (*KINDS, "other")),
            )
        )
    header = ("bytes a parameter", "formula", "is", "held", "at most in a step", "off by", *KINDS, "other")
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
    assert not off, f"more than 5 % from the formula: {[(row['pp'], row['dp'], row['strategy']) for row in off]}"
    assert all(held == foreseen for row in activations for held, foreseen in row["held, simulated"])


if __name__ == "__main__":
    main()
