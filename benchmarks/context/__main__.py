"""A step of one long sequence: in one process, and divided between two context-parallel ranks."""

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
from benchmarks.context.subject import SYSTEMS, WHOLE, Size, Subject, batch, build
from safetensors.torch import save_file

from pipeloom.models import loss_fn

TOLERANCE = 2e-5
DEFAULT = [name for name in SYSTEMS if name != "ring self-attention"]  # its weights need 0.5 GB per layer and rank


def write_reference(size: Size, path: Path) -> None:
    """Loss and gradients by plain autograd."""
    model = build(size)
    inputs, targets = batch(size.sequence)
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    save_file({"loss": loss.detach(), **gradients}, path)


def measure(names: Sequence[str], size: Size, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: {what: [] for what in ("seconds", "cpu", "attention", "waiting")} for name in names
    }
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, ExitStack() as stack:
        reference = Path(scratch) / "reference.safetensors"
        torch.set_num_threads(1)
        write_reference(size, reference)
        crews = {name: stack.enter_context(Crew(name, SYSTEMS[name].ranks, Subject, size)) for name in names}
        for name, crew in crews.items():
            answers = crew.call("build", SYSTEMS[name], str(reference))
            error = max(answer.error for answer in answers)
            if error > TOLERANCE:
                raise SystemExit(f"{name} is {error:.1e} from plain autograd")
            results[name] |= {
                "error": error,
                "kept_bytes": [answer.kept_bytes for answer in answers],
                "sent_bytes": [answer.sent_bytes for answer in answers],
            }
        for number in range(1 + rounds):
            for name, crew in crews.items():
                steps, attention = crew.call("step"), crew.call("attend", SYSTEMS[name])
                if number:  # the first warms up
                    results[name]["seconds"].append(max(s.end for s in steps) - min(s.start for s in steps))
                    results[name]["cpu"].append(max(s.cpu for s in steps))
                    results[name]["waiting"].append(max(s.waited for s in steps))
                    results[name]["attention"].append(max(e for _, e in attention) - min(s for s, _ in attention))
    return results


def tables(results: dict[str, Any]) -> Parts:
    rows = []
    for name, result in results.items():
        faster = [
            ratio(results[WHOLE][what], result[what]).show() if WHOLE in results else ""
            for what in ("seconds", "cpu", "attention")
        ]
        kept = ", ".join(f"{size / 2**20:.0f}" for size in result["kept_bytes"])
        sent = ", ".join(f"{size / 2**20:.0f}" for size in result["sent_bytes"])
        times = (spread(result["seconds"]).show(), *faster, spread(result["waiting"]).show())
        rows.append((name, *times, kept, sent, f"{result['error']:.0e}"))
    header = (
        *("system", "seconds per step", f"times faster than {WHOLE}", "times less CPU time per rank"),
        *("attention alone: times faster", "seconds in collectives", "MiB kept per rank", "MiB sent per rank"),
        "largest error",
    )
    return [table(header, rows)]


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README: speed-up of two ranks over one process."""
    if WHOLE not in results:
        return {}
    return {f"{WHOLE} / {name}": ratio(results[WHOLE]["seconds"], one["seconds"]) for name, one in results.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=DEFAULT)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "context.json")
    arguments = parser.parse_args()
    machine = environment()
    results = measure(arguments.systems, Size(arguments.sequence, arguments.layers), arguments.rounds)
    print(markdown(tables(results)))
    settings = {"rounds": arguments.rounds, "sequence": arguments.sequence, "layers": arguments.layers}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
