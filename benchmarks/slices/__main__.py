"""A batch of one long sequence on two ranks: whole, and cut into slices."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.slices.subject import NUM_RANKS, SYSTEMS, WHOLE, Subject, batch, build, config
from safetensors.torch import save_file

from pipeloom.models import loss_fn
from pipeloom.plan.slicing import slice_for_schedule
from pipeloom.plan.slicing.measure_slices import measure_slices

TOLERANCE = 2e-5


def write_reference(sequence: int, path: Path) -> None:
    """Loss and gradients by plain autograd."""
    model = build(sequence)
    inputs, targets = batch(sequence)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    save_file({"loss": loss.detach(), **gradients}, path)


def measure(names: Sequence[str], sequence: int, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {name: {"seconds": []} for name in names}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, ExitStack() as stack:
        reference = Path(scratch) / "reference.safetensors"
        torch.set_num_threads(1)
        write_reference(sequence, reference)
        crews = {name: stack.enter_context(Crew(name, NUM_RANKS, Subject, sequence)) for name in names}
        for name, crew in crews.items():
            cut, lengths = SYSTEMS[name], None
            if cut.slices is None:
                costs = measure_slices(config(sequence), num_ranks=NUM_RANKS, grid=64).costs
                best = slice_for_schedule(costs, schedule=cut.schedule, sequence=sequence, num_ranks=NUM_RANKS, grid=64)
                (lengths,) = best.slices
            answers = crew.call("build", cut, lengths, str(reference))
            error = max(error for error, _, _ in answers)
            if error > TOLERANCE:
                raise SystemExit(f"{name} is {error:.1e} from plain autograd")
            results[name] |= {
                "error": error,
                "peaks": [peak for _, peak, _ in answers],
                "peak_bytes": [size for _, _, size in answers],
                "lengths": lengths,
            }
        for number in range(1 + rounds):
            for name, crew in crews.items():
                stamps = crew.call("step")
                if number:  # the first warms up
                    results[name]["seconds"].append(max(e for _, e in stamps) - min(s for s, _ in stamps))
    return results


def tables(results: dict[str, Any]) -> Parts:
    rows = []
    for name, result in results.items():
        faster = ratio(results[WHOLE]["seconds"], result["seconds"]).show() if WHOLE in results else ""
        peaks = ", ".join(f"{peak:.2f}" for peak in result["peaks"])
        sizes = ", ".join(f"{size / 2**20:.0f}" for size in result["peak_bytes"])
        rows.append((name, spread(result["seconds"]).show(), faster, peaks, sizes, f"{result['error']:.0e}"))
    best = [f"{name}: {list(r['lengths'])}" for name, r in results.items() if r["lengths"] is not None]
    header = ("system", "seconds a step", f"times faster than {WHOLE}", "peak activations", "MiB kept", "largest error")
    return [table(header, rows), *best]


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README: speed-up of slices over whole sequences."""
    if WHOLE not in results:
        return {}
    return {f"{WHOLE} / {name}": ratio(results[WHOLE]["seconds"], one["seconds"]) for name, one in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slices", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "slices.json")
    arguments = parser.parse_args()
    machine = environment()
    results = measure(arguments.systems, arguments.sequence, arguments.rounds)
    print(markdown(tables(results)))
    settings = {"rounds": arguments.rounds, "sequence": arguments.sequence, "num_ranks": NUM_RANKS}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
