"""Bytes of a training state per process: plain data parallelism and ZeRO under a pipeline, beside their formulas."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.workloads import GPTWorkload
from benchmarks.memory.subject import KINDS, Holder, Layout, Report

NUM_PROCESSES = 4
WORKLOAD = GPTWorkload(micro_batch=1, sequence_length=8, num_microbatches=8)


class Case(NamedTuple):
    """What is measured on every mesh.

    Attributes:
        strategy, granularity, gradients: of `Layout`.
        moment: "held" between backwards and update, or "most" in a step: at which the formula is compared.
        exact: whether it is to be met within 5 %; else it is not to be exceeded by more.
    """

    strategy: str
    granularity: str
    gradients: str
    moment: str = "held"
    exact: bool = True

    def __str__(self) -> str:
        return f"{self.strategy}, {self.granularity}, gradients {self.gradients}"


# Bytes a parameter of one of d copies, ZeRO (arXiv:1910.02054, section 3.1 and figure 1): 16-bit parameters and
# gradients, and 12 bytes of float32 master and Adam's two moments.
FORMULAS: dict[str, tuple[str, Callable[[int], float]]] = {
    "ddp": ("16 N", lambda d: 16),
    "zero1": ("4 N + 12 N/d", lambda d: 4 + 12 / d),
    "zero2": ("2 N + 14 N/d", lambda d: 2 + 14 / d),
    "zero3": ("16 N/d", lambda d: 16 / d),
}
CASES = (
    Case("ddp", "step", "same"),
    Case("zero1", "step", "same", moment="most"),
    Case("zero2", "step", "same"),
    Case("zero2", "microbatch", "same"),
    Case("zero3", "step", "same", exact=False),
    Case("zero3", "microbatch", "same", exact=False),
    Case("zero3", "microbatch", "float32"),
)
MESHES = ((4, 1), (2, 2), (1, 4))
SCHEDULES = ("gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v", "dualpipev")


def state_rows(crew: Crew) -> list[dict[str, Any]]:
    """Every case on every mesh, each with the reports of all processes."""
    rows = []
    for pp, dp in MESHES:
        for case in CASES:
            layout = Layout(pp, dp, case.strategy, case.granularity, gradients=case.gradients)
            reports: list[Report] = crew.call("measure", WORKLOAD, layout)
            rows.append({"pp": pp, "dp": dp, **case._asdict(), "reports": [report._asdict() for report in reports]})
            rows[-1]["off_percent"] = _off_percent(rows[-1])
            print(f"PP{pp} x DP{dp} {case}: {rows[-1]['off_percent']:+.1f} %", flush=True)
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


def _bytes_a_parameter(report: dict[str, Any], moment: str) -> float:
    """Of one process; of all kinds that the formulas have, or the most in a step."""
    held = sum(report["held"][kind] for kind in KINDS)
    return float((held if moment == "held" else report["most"]) / report["num_parameters"])


def _off_percent(row: dict[str, Any]) -> float:
    """Of the process furthest from the formula."""
    found = [_bytes_a_parameter(report, row["moment"]) for report in row["reports"]]
    return max((100 * (value / _expected(row) - 1) for value in found), key=abs)


def tables(states: list[dict[str, Any]], activations: list[dict[str, Any]]) -> Parts:
    """One row for each case and mesh: the process that holds most."""
    rows: list[tuple[object, ...]] = []
    for row in states:
        held = {moment: max(_bytes_a_parameter(r, moment) for r in row["reports"]) for moment in ("held", "most")}
        report = max(row["reports"], key=lambda report: _bytes_a_parameter(report, "held"))
        kinds = [report["held"][kind] / report["num_parameters"] for kind in (*KINDS, "other")]
        name = f"PP{row['pp']} x DP{row['dp']} {row['strategy']}, {row['granularity']}, {row['gradients']}"
        numbers = [f"{value:.2f}" for value in (_expected(row), held["held"], held["most"])]
        off = f"{row['off_percent']:+.1f} % ({row['moment']})"
        rows.append((name, FORMULAS[row["strategy"]][0], *numbers, off, *(f"{size:.2f}" for size in kinds)))
    header = ("bytes a parameter", "formula", "is", "held", "most in a step", "off by", *KINDS, "other")
    parts = [table(header, rows)]
    rows = [
        (row["schedule"], *(f"{held}, {foreseen}" for held, foreseen in row["held, simulated"])) for row in activations
    ]
    header = ("live activations: held, simulated", *(f"process {rank}" for rank in range(NUM_PROCESSES)))
    return [*parts, table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "memory.json")
    arguments = parser.parse_args()
    machine = environment()
    with Crew("memory", NUM_PROCESSES, Holder) as crew:
        states = state_rows(crew)
        activations = activation_rows(crew)
    parts = tables(states, activations)
    print("\n" + markdown(parts))
    save(arguments.output, {"workload": str(WORKLOAD)}, machine, {"states": states, "activations": activations}, parts)
    wrong = [row for row in states if row["off_percent"] > 5 or (row["exact"] and row["off_percent"] < -5)]
    assert not wrong, f"more than 5 % from the formula: {[(row['pp'], row['dp'], row['strategy']) for row in wrong]}"
    assert all(held == foreseen for row in activations for held, foreseen in row["held, simulated"])


if __name__ == "__main__":
    main()
