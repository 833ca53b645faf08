"""What pipeloom costs and reaches on one CUDA device.

`make gpu` runs all cases behind the tests of tests/gpu.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.gpu.loops import graphs, one_stage, ranks, torch_peer
from benchmarks.gpu.processes import processes
from benchmarks.gpu.products import flops, fp8, memory, split
from benchmarks.gpu.subject import Figure, Machine

CASES: dict[str, Callable[[Machine], Iterator[Figure]]] = {
    "split": split,
    "one_stage": one_stage,
    "ranks": ranks,
    "torch": torch_peer,
    "memory": memory,
    "graphs": graphs,
    "processes": processes,
    "flops": flops,
    "fp8": fp8,
}
_LINES = 14  # of a traceback


def run(name: str, arguments: argparse.Namespace, end: float) -> tuple[list[Figure], str | None]:
    """The figures of one case, and why it stopped; None: it is whole."""
    deadline = min(end, time.monotonic() + arguments.seconds)
    machine = Machine(torch.device(arguments.device), arguments.tiny, arguments.rounds, deadline)
    figures = []
    try:
        for figure in CASES[name](machine):
            figures.append(figure)
            print("  ".join(map(str, figure.row())), flush=True)
    except Exception as error:
        print("\n".join(traceback.format_exc().splitlines()[-_LINES:]), flush=True)
        return figures, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        machine.free()
    return figures, None


def tables(figures: list[Figure], failures: dict[str, str]) -> Parts:
    header = ("case", "what", "median (quartiles)", "target", "met")
    rows = [figure.row() for figure in figures]
    failed = [f"Case `{name}` stopped: {reason}" for name, reason in failures.items()]
    return [table(header, rows), *failed]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="names of cases, comma-separated")
    parser.add_argument("--rounds", type=int, default=15, help="rounds per comparison at most; default 15")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds per case, then its rounds end; default 20")
    parser.add_argument("--total", type=float, default=150.0, help="seconds of all cases; default 150")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "gpu.json")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0")
    parser.add_argument("--tiny", action="store_true", help="a few layers, to try the code; the figures mean nothing")
    arguments = parser.parse_args()
    wanted = arguments.cases.split(",")
    if unknown := [name for name in wanted if name not in CASES]:
        parser.error(f"--cases {','.join(unknown)}: unknown. Use some of {', '.join(CASES)}.")
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"benchmarks.gpu: SKIPPED, torch {torch.__version__} finds no CUDA device.")
        return 0
    machine = environment() | device_facts(arguments.device)
    figures: list[Figure] = []
    failures: dict[str, str] = {}
    took: dict[str, float] = {}
    end = time.monotonic() + arguments.total
    for name in wanted:
        start = time.monotonic()
        if start > end:
            failures[name] = f"not run: --total {arguments.total:g} seconds had passed"
            continue
        print(f"== {name}", flush=True)
        found, reason = run(name, arguments, end)
        figures += found
        if reason is not None:
            failures[name] = reason
        took[name] = time.monotonic() - start
        parts = tables(figures, failures)
        settings = {"rounds": arguments.rounds, "tiny": arguments.tiny}
        results = {"figures": [each._asdict() for each in figures], "failures": failures, "seconds": took}
        headlines = {f"{each.case}, {each.what}": each.value for each in figures if each.target is not None}
        save(arguments.output, settings, machine, results, parts, headlines)
    print(f"\n{markdown(tables(figures, failures))}\n\n{machine['device']}. Seconds: " + _seconds(took))
    return 1 if failures else 0


def _seconds(took: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.0f}" for name, seconds in took.items())


def device_facts(device: str) -> dict[str, Any]:
    """The device and the software that drives it."""
    if not device.startswith("cuda"):
        return {"device": device}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}",
        "multiprocessors": properties.multi_processor_count,
    }


if __name__ == "__main__":
    sys.exit(main())
