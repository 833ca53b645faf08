"""Step times of stages that processes share: simulated, and measured."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import Spread, spread
from benchmarks.inside_stage import emulated, real

from pipeloom.parallel.inside_stage import InsideStage

LAYOUTS = {
    "1d": InsideStage(tensor=2),
    "1d with sequence": InsideStage(tensor=2, sequence=True),
    "1d of 4": InsideStage(tensor=4),
    "2d": InsideStage(tensor=4, layout="2d"),
    "2.5d": InsideStage(tensor=8, layout="2.5d", depth=2),
    "3d": InsideStage(tensor=8, layout="3d"),
    "ring": InsideStage(context=2),
    "ring of 4": InsideStage(context=4),
    "ring-self-attention": InsideStage(context=2, context_kind="ring-self-attention"),
    "ulysses": InsideStage(context=2, context_kind="ulysses"),
}


def measure_emulated(names: list[str], ranks: list[int], schedule: str, rounds: int) -> dict[str, Any]:
    found = {}
    for count in ranks:
        for name in names:
            work = emulated.work_of(LAYOUTS[name], count, schedule)
            key = name if count == 1 else f"{name}, {count} stages"
            found[key] = emulated.measure(key, work, rounds)
            shown = spread(_ratios(found[key])).show("{:.3f}")
            print(f"{key}: predicted / measured {shown}", file=sys.stderr, flush=True)
    return found


def _ratios(result: dict[str, Any]) -> list[float]:
    predicted = result["predicted"]
    each = predicted if isinstance(predicted, list) else [predicted] * len(result["seconds"])
    return [a / b for a, b in zip(each, result["seconds"], strict=True)]


def tables(results: dict[str, Any]) -> Parts:
    parts: list[Any] = []
    if results["emulated"]:
        rows = [
            (
                name,
                found["processes"],
                f"{found['without_collectives'] * 1e3:.0f}",
                f"{found['predicted'] * 1e3:.0f}",
                spread(found["seconds"]).show("{:.0f}", 1e3),
                spread(_ratios(found)).show("{:.3f}"),
                f"{found['error']:.0e}",
            )
            for name, found in results["emulated"].items()
        ]
        header = ("layout", "processes", "without collectives ms", "predicted ms", "measured ms")
        parts += ["### Emulated devices", table((*header, "predicted / measured", "error of losses"), rows)]
    if results["real"]:
        rows = [
            (
                name,
                *(spread(found[key]).show("{:.0f}", 1e3) for key in ("computing", "collectives", "seconds")),
                spread(_ratios(found)).show("{:.3f}"),
                spread([a / b for a, b in zip(found["recorded"], found["seconds"], strict=True)]).show("{:.3f}"),
                f"{found['error']:.0e}",
            )
            for name, found in results["real"].items()
        ]
        header = ("layout", "computing ms", "collectives ms", "measured ms", "predicted / measured")
        parts += ["### Two processes on two cores", table((*header, "from recorded actions", "error of losses"), rows)]
    return parts


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README: predicted over measured step time."""
    return {
        f"{name}, {kind}: predicted / measured": spread(_ratios(found))
        for kind, all_found in results.items()
        for name, found in all_found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inside_stage", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2), default=[1, 2], help="stages")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--kinds", nargs="+", choices=("emulated", "real"), default=["emulated", "real"])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "inside_stage.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine, results = environment(), dict[str, Any](emulated={}, real={})
    if "emulated" in arguments.kinds:
        results["emulated"] = measure_emulated(arguments.layouts, arguments.ranks, arguments.schedule, arguments.rounds)
    if "real" in arguments.kinds:
        for name in arguments.layouts:
            if LAYOUTS[name].processes == 2:
                results["real"][name] = real.measure(name, real.work_of(LAYOUTS[name]), arguments.rounds)
    print(markdown(tables(results)))
    settings = {"rounds": arguments.rounds, "schedule": arguments.schedule}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
