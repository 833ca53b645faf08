"""The plan that is predicted to be fastest on this machine, beside the measured steps of all configurations."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.plan_local.cases import CASES, SCHEDULES, STRATEGIES, Case, configurations, label
from benchmarks.plan_local.subject import Trainer, mean_layers

from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import find_cluster


def measure(case: Case, crew: Crew, cluster: Cluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """For each configuration of a case: predicted seconds by tables and by profile, and measured ones."""
    rates = cluster.beside(case.processes).rates
    found = list(configurations(case, tuple(arguments.schedules), tuple(arguments.strategies)))
    sizes = sorted({of.microbatch_size for of in found})
    layers = mean_layers(crew.call("layers", case.config, sizes, rates))
    model = Architecture.of_gpt(case.config)
    tables, profile = CostModel(model=model, cluster=cluster), CostModel(model=model, cluster=cluster, measured=layers)
    rows: list[dict[str, Any]] = []
    for of in found:
        predicted = profile.predict(of)
        rows.append(
            {
                "label": label(of),
                "tables": tables.predict(of).step_seconds,
                "profile": predicted.step_seconds,
                "update": predicted.update_seconds,
                "work": of.devices // of.pipeline * of.microbatches * sum(map(sum, profile.stage_seconds(of))),
                "measured": [],
                "cpu": [],
            }
        )
        crew.call("build", label(of), case.config, of)
    for _ in range(arguments.rounds):
        for row in rows:
            steps = crew.call("steps", row["label"], arguments.steps)
            for each in zip(*steps, strict=True):
                seconds, busy = zip(*each, strict=True)
                row["measured"].append(max(seconds))
                row["cpu"].append(sum(busy))
    for row in rows:
        row["busy"] = crew.call("busy", row["label"])
    crew.call("close_all")
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a case shows: the chosen plan over the best, and predicted over measured steps, by kind of prediction."""
    measured = [median(row["measured"]) for row in rows]
    best = min(measured)
    shown: dict[str, Any] = {"best": rows[measured.index(best)]["label"], "configurations": len(rows)}
    for kind in ("tables", "profile"):
        predicted = [row[kind] for row in rows]
        chosen = predicted.index(min(predicted))
        ratios = sorted(a / b for a, b in zip(predicted, measured, strict=True))
        shown[kind] = {
            "chosen": rows[chosen]["label"],
            "over_best": measured[chosen] / best,
            "least": ratios[0],
            "median": median(ratios),
            "most": ratios[-1],
        }
    return shown


def tables(results: dict[str, Any]) -> Parts:
    rows = []
    for name, of_case in results.items():
        for kind in ("profile", "tables"):
            shown = of_case["summary"][kind]
            ratios = " ".join(f"{shown[key]:.2f}" for key in ("least", "median", "most"))
            best = of_case["summary"]["best"]
            rows.append((name, kind, shown["chosen"], best, f"{shown['over_best']:.3f}", ratios))
    header = (
        "case",
        "prediction",
        "chosen",
        "fastest",
        "chosen / fastest",
        "predicted / measured: least, median, most",
    )
    return [table(header, rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_local", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a configuration in a round")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="their numbers")
    parser.add_argument("--cluster", default="local", help="local, or a cluster file")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--seconds", type=float, default=3600.0, help="no case begins after this many")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "plan_local.json")
    arguments = parser.parse_args()
    machine, cluster, start = environment(), find_cluster(arguments.cluster, "--cluster"), time.monotonic()
    results: dict[str, Any] = {}
    for processes in sorted({CASES[number].processes for number in arguments.cases}):
        with Crew(f"{processes} processes", processes, Trainer) as crew:
            for case in (CASES[number] for number in arguments.cases):
                if case.processes == processes and time.monotonic() - start < arguments.seconds:
                    rows = measure(case, crew, cluster, arguments)
                    results[case.name] = {"summary": summary(rows), "rows": rows}
                    print(markdown(tables({case.name: results[case.name]})), flush=True)
    parts = tables(results)
    settings = {"rounds": arguments.rounds, "steps": arguments.steps}
    save(arguments.output, settings, machine, results, parts)


if __name__ == "__main__":
    main()
