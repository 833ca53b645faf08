"""The plan that the search finds beside the best of all configurations, simulated, on small clusters."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, markdown, save, table

from pipeloom.errors import InputError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import CLUSTERS
from pipeloom.plan.search.best_first import Answer, find_plans
from pipeloom.plan.search.request import Request, parse_fixed

GIB = 2.0**30
HEADER = ("model", "devices", "batch", "cap", "plan", "best of all", "ratio", "peak", "seconds", "exhaustive", "times")


def models() -> list[Architecture]:
    sizes = ((8, 1024, 16, 32000, 512), (12, 2048, 16, 51200, 2048), (16, 1536, 12, 50304, 2048))
    return [
        Architecture(
            name=f"{layers} x {width}", layers=layers, width=width, heads=heads, key_heads=heads, mlp_width=4 * width,
            vocabulary_size=vocabulary, sequence_length=length, positions="learned", biases=True, tie_embeddings=True,
        )
        for layers, width, heads, vocabulary, length in sizes
    ]  # fmt: skip


def timed(model: Architecture, request: Request, *, exhaustive: bool) -> tuple[Answer, float]:
    """The answer, and the CPU seconds of the search; nothing is kept from an earlier one."""
    start = time.process_time()
    found = find_plans(CostModel(model=model, cluster=CLUSTERS["dgx-a100-80"]), request, exhaustive=exhaustive)
    return found, time.process_time() - start


def compare(model: Architecture, devices: int, batch: int, cap: str, fixed: str) -> dict[str, Any]:
    """One case. Ends the run where a plan exceeds the cap."""
    request = Request(devices=devices, batch_size=batch, fixed=parse_fixed(fixed) if fixed else {}, top=1)
    row = {"model": model.name, "devices": devices, "batch": batch, "cap": cap}
    try:
        request = replace(request, memory_bytes=bytes_of(model, request, cap))
        row["cap_gib"] = request.memory_bytes / GIB
        found, seconds = timed(model, request, exhaustive=False)
    except InputError as error:
        return row | {"refused": str(error)}
    every, all_seconds = timed(model, request, exhaustive=True)
    plan, best = found.plans[0], every.plans[0]
    if max(plan.peak, best.peak) > request.memory_bytes:
        raise SystemExit(f"{row}: a plan holds {plan.peak} bytes, the cap is {request.memory_bytes}")
    return row | {
        "step": plan.step_seconds,
        "best": best.step_seconds,
        "peak": plan.peak,
        "seconds": seconds,
        "exhaustive": all_seconds,
        "simulated": [found.simulated, every.simulated],
    }


def bytes_of(model: Architecture, request: Request, cap: str) -> float:
    """Bytes of a cap: GiB, or a percentage of the way from the least that a plan needs to what the fastest needs."""
    if not cap.endswith("%"):
        return float(cap) * GIB
    least, most = (
        timed(model, replace(request, objective=objective), exhaustive=False)[0].plans[0].peak
        for objective in ("memory", "time")
    )
    return least + float(cap[:-1]) / 100 * (most - least)


def cells(row: dict[str, Any]) -> list[object]:
    shown: list[object] = [
        row["model"],
        row["devices"],
        row["batch"],
        row["cap"] if row["cap"].endswith("%") else f"{row['cap']} GiB",
    ]
    if "refused" in row:
        return [*shown, "none fits", *["-"] * 6]
    return [
        *shown, f"{1e3 * row['step']:.4g} ms", f"{1e3 * row['best']:.4g} ms", f"{row['step'] / row['best']:.4f}",
        f"{row['peak'] / GIB:.2f} of {row['cap_gib']:.2f} GiB", f"{row['seconds']:.2f}", f"{row['exhaustive']:.1f}",
        f"{row['exhaustive'] / row['seconds']:.0f}",
    ]  # fmt: skip


def known(path: Path, fixed: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The cases of earlier runs, in whose file this one's are saved too."""
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    if (other := saved["settings"].get("fix", "")) != fixed:
        raise SystemExit(f"{path} has cases with --fix {other!r}. Choose another --output.")
    return {key(row): row for row in saved["results"]}


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["devices"], row["batch"], row["cap"], row["model"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_search", description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--caps", nargs="+", default=["25%", "73.6"], help="GiB per device, or a percentage")
    parser.add_argument("--fix", default="", help="values that all configurations have, as of pipeloom plan")
    parser.add_argument("--seconds", type=float, default=900.0, help="no case begins after this many")
    parser.add_argument("--again", action="store_true", help="measure cases that the output has already")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "plan_search.json")
    options = parser.parse_args()
    machine, start, rows = environment(), time.monotonic(), known(options.output, options.fix)
    for batch, devices, cap, model in product(options.batches, options.devices, options.caps, models()):
        case = {"model": model.name, "devices": devices, "batch": batch, "cap": cap}
        if key(case) in rows and not options.again:
            continue
        if time.monotonic() - start > options.seconds:
            break
        rows[key(case)] = compare(model, devices, batch, cap, options.fix)
        print(*cells(rows[key(case)]), sep=" | ", flush=True)
        ordered = [rows[each] for each in sorted(rows)]
        settings = {"fix": options.fix} if options.fix else {}
        save(options.output, settings, machine, ordered, [table(HEADER, map(cells, ordered))])
    print(markdown([table(HEADER, map(cells, (rows[each] for each in sorted(rows))))]))


if __name__ == "__main__":
    main()
