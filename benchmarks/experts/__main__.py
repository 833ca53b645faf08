"""Mixtures of experts beside dense models of equal active arithmetic, and beside other libraries' experts.

One thread computes all of it, so CPU time of the thread is what counts: it leaves out what other processes take.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.reference import TOLERANCE
from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.experts import processes
from benchmarks.experts.systems import MAKERS, Sizes, System, even_experts, gpt, layers

from pipeloom.processes.host_memory import keep_freed_memory

SIZES = {
    "width 512, 8 x 256 tokens": Sizes(width=512, samples=8),
    "width 256, 8 x 256 tokens": Sizes(width=256, samples=8),
    "width 256, 2 x 256 tokens": Sizes(width=256, samples=2),
}
PARTS = ("gpt", "layers", "processes")
ROUTERS = ("topk", "switch", "sigmoid", "glam", "noisy-topk", "expert-choice")
EVEN = "even loads"
MIXTURES = ("transformers eager", "transformers grouped_mm", "pipeloom take_over", "deepspeed")


def systems(part: str, sizes: Sizes) -> dict[str, System]:
    """The systems of a part, after their numbers are compared."""
    if part == "gpt":
        found = {"dense": gpt(sizes, None), EVEN: even_experts(sizes)}
        for router in ROUTERS:
            found[router] = gpt(sizes, router)
            compare(router, found[router].gradients(), gpt(sizes, router, plain=True).gradients())
            found[router].model.train()
        return found
    names = [name for name in MAKERS if name != "deepspeed ep"]
    if importlib.util.find_spec("deepspeed") is None:
        names.remove("deepspeed")
    found = {name: layers(sizes, name) for name in names}
    expected = found["transformers eager"]
    loss = expected.step()
    of_embedding = next(expected.model.parameters())
    for name in names[1:]:
        if name != "transformers eager":
            compare(f"{name}: loss", [found[name].step()], [loss])
    assert of_embedding.grad is not None
    gradients = {name: next(system.model.parameters()).grad for name, system in found.items()}
    for name in names[1:]:
        if name != "pipeloom":  # it declares a balance loss
            compare(f"{name}: gradient of the embedding", [gradients[name]], [of_embedding.grad])
    return {**found, EVEN: even_experts(sizes, gated=True)}


def compare(name: str, found: list[Any], expected: list[Any]) -> None:
    """Raise SystemExit where tensors differ by more than `TOLERANCE` of the largest element."""
    for a, b in zip(found, expected, strict=True):
        error = float((a - b).abs().max() / b.abs().max().clamp(min=1e-30))
        if not error <= TOLERANCE:
            raise SystemExit(f"{name} differs by {error:.1e}, more than {TOLERANCE:.0e}: nothing was timed.")


def measure(part: str, sizes: Sizes, rounds: int) -> dict[str, list[float]]:
    """CPU seconds per step, by system; one step of each per round."""
    found = systems(part, sizes)
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(1 + rounds):  # the first round is not counted
        for name, system in found.items():
            start = time.thread_time()
            system.step()
            if number:
                seconds[name].append(time.thread_time() - start)
    return seconds


def tables(part: str, results: dict[str, dict[str, list[float]]]) -> Parts:
    found: list[str | Table] = []
    for label, seconds in results.items():
        found.append(f"### {part}: {label}")
        rows = [
            (
                name,
                spread(taken).show("{:.1f}", 1e3),
                ratio(taken, seconds["dense"]).show("{:.3f}"),
                ratio(*((seconds["pipeloom"], taken) if part == "layers" else (taken, seconds[EVEN]))).show("{:.3f}"),
            )
            for name, taken in seconds.items()
        ]
        header = ("model", "CPU ms per micro-batch", "/ dense")
        found.append(table((*header, "pipeloom / it" if part == "layers" else f"/ {EVEN}"), rows))
    return found


def headlines(part: str, results: dict[str, dict[str, list[float]]]) -> dict[str, Spread]:
    """Ratios for the README."""
    found: dict[str, Spread] = {}
    for label, seconds in results.items():
        names = ROUTERS if part == "gpt" else ("pipeloom",)
        found |= {f"{part}, {label}: {name} / dense": ratio(seconds[name], seconds["dense"]) for name in names}
        if part == "gpt":
            found |= {f"{part}, {label}: {name} / {EVEN}": ratio(seconds[name], seconds[EVEN]) for name in names}
        for name in (*MIXTURES, EVEN) if part == "layers" else ():
            if name in seconds:
                found[f"{part}, {label}: pipeloom / {name}"] = ratio(seconds["pipeloom"], seconds[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("part", nargs="?", choices=(*PARTS, "all"), default="all", help="default: all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sizes", nargs="+", help="headings of the tables, without the part")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of PART.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    for part in PARTS if arguments.part == "all" else (arguments.part,):
        machine, settings = environment(), {"rounds": arguments.rounds}
        ratios: dict[str, Spread]
        found: dict[str, Any]
        if part == "processes":
            sizes = {label: each for label, each in processes.SIZES.items() if label in (arguments.sizes or [label])}
            found = {label: processes.measure(each, arguments.rounds) for label, each in sizes.items()}
            parts, ratios = processes.tables(found), processes.headlines(found)
        else:
            sizes = {label: each for label, each in SIZES.items() if label in (arguments.sizes or [label])}
            found = {label: measure(part, each, arguments.rounds) for label, each in sizes.items()}
            parts, ratios = tables(part, found), headlines(part, found)
        print(markdown(parts), flush=True)
        save(arguments.output / f"{part}.json", settings, machine, found, parts, ratios)


if __name__ == "__main__":
    main()
