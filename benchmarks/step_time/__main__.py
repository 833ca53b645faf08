"""Step time of the same GPT on two processes: pipeloom, torch.distributed.pipelining, DeepSpeed, and no pipeline."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.common.systems import Bench, System, build_checked, step_seconds
from benchmarks.common.workloads import GPTWorkload

from pipeloom.errors import InputError
from pipeloom.plan.costs.named_clusters import find_cluster

NUM_RANKS = 2
CONFIGURATIONS = {
    "4x256 M=8": GPTWorkload(micro_batch=4, sequence_length=256, num_microbatches=8),
    "1x64 M=8": GPTWorkload(micro_batch=1, sequence_length=64, num_microbatches=8),
    "1x64 M=16": GPTWorkload(micro_batch=1, sequence_length=64, num_microbatches=16),
    "1x16 w128 M=16": GPTWorkload(micro_batch=1, sequence_length=16, num_microbatches=16, width=128),
}


class Entry(NamedTuple):
    """A system, the processes it runs in and torch's threads in each."""

    num_processes: int
    num_threads: int
    system: System

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline; they may be threads of one process."""
        return 1 if self.system.kind == "sequential" else NUM_RANKS


ENTRIES = {
    "1 process, 1 thread, micro-batches": Entry(1, 1, System(kind="sequential")),
    "two of these side by side": Entry(2, 1, System(kind="sequential")),
    "1 process, 1 thread, memory kept": Entry(1, 1, System(kind="sequential", options={"keeps_memory": True})),
    "1 process, 1 thread, whole batch": Entry(1, 1, System(kind="sequential", options={"whole_batch": True})),
    "1 process, 2 threads, micro-batches": Entry(1, 2, System(kind="sequential")),
    "1 process, 2 threads, whole batch": Entry(1, 2, System(kind="sequential", options={"whole_batch": True})),
    "pipeloom auto": Entry(2, 1, System(kind="pipeloom", schedule="auto")),
    "pipeloom 1f1b": Entry(2, 1, System(kind="pipeloom", schedule="1f1b")),
    "torch 1f1b": Entry(2, 1, System(kind="torch", schedule="1f1b")),
    "deepspeed 1f1b": Entry(2, 1, System(kind="deepspeed")),
    "pipeloom gpipe": Entry(2, 1, System(kind="pipeloom", schedule="gpipe")),
    "torch gpipe": Entry(2, 1, System(kind="torch", schedule="gpipe")),
    "pipeloom 1f1b gloo": Entry(2, 1, System(kind="pipeloom", schedule="1f1b", options={"transport": "torch"})),
    "pipeloom 1f1b threads": Entry(1, 2, System(kind="pipeloom", schedule="1f1b", options={"transport": "threads"})),
}
ONE_THREAD = "1 process, 1 thread, micro-batches"
SIDE_BY_SIDE = "two of these side by side"
COMPARISONS = [
    ("pipeloom auto", "pipeloom 1f1b"),
    ("pipeloom auto", "pipeloom gpipe"),
    ("pipeloom 1f1b", "torch 1f1b"),
    ("pipeloom 1f1b", "deepspeed 1f1b"),
    ("pipeloom gpipe", "torch gpipe"),
    ("pipeloom 1f1b", "pipeloom 1f1b gloo"),
]


def measure(workload: GPTWorkload, names: list[str], num_rounds: int, num_steps: int) -> dict[str, Any]:
    """Rounds of all systems in turn; the time of a system in a round is the median of its steps there."""
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, ExitStack() as stack:
        reference = Path(scratch) / "reference.safetensors"
        write_reference(workload, reference)
        crews = {}
        for name in names:
            processes, threads, _ = entry = ENTRIES[name]
            crew = Crew(
                name, processes, Bench, entry.num_ranks, scratch, num_threads=threads, process_group=processes > 1
            )
            crews[name] = stack.enter_context(crew)
        for name, crew in crews.items():
            errors[name] = build_checked(crew, name, ENTRIES[name].system, workload, reference)
        for _ in range(num_rounds):
            for name, crew in crews.items():
                # One step first, untimed: its caches were used by the others since its last turn.
                stamps = crew.call("run_steps", name, 1 + num_steps)
                seconds[name].append(spread(step_seconds(stamps)[1:]).median)
    return {"errors": errors, "seconds": seconds}


def ideal_share(num_microbatches: int) -> float:
    """The bubble-limited part of the one-thread time: (M + P - 1) / (P M)."""
    return (num_microbatches + NUM_RANKS - 1) / (NUM_RANKS * num_microbatches)


def tables(results: dict[str, Any]) -> Parts:
    """Every system's time and efficiency, then the ratios, by configuration."""
    parts: list[str | Table] = []
    for label, result in results.items():
        seconds = result["seconds"]
        share = ideal_share(CONFIGURATIONS[label].num_microbatches)
        rows = []
        for name, values in seconds.items():
            efficiencies = [
                ratio([share * t for t in seconds[limit]], values).show("{:.3f}") if limit in seconds else ""
                for limit in (ONE_THREAD, SIDE_BY_SIDE)
            ]
            beside = [ratio([t / NUM_RANKS for t in seconds[SIDE_BY_SIDE]], values)] if SIDE_BY_SIDE in seconds else []
            without_bubble = beside[0].show("{:.3f}") if beside else ""
            error = f"{result['errors'][name]:.0e}"
            rows.append((name, spread(values).show("{:.1f}", 1e3), *efficiencies, without_bubble, error))
        parts.append(f"### {label}")
        parts.append(
            table(
                ("system", "ms per step", "efficiency", "of two beside", "without bubble", "largest error"),
                rows,
            )
        )
        pairs = [(a, b) for a, b in COMPARISONS if a in seconds and b in seconds]
        rows = [(f"{a} / {b}", ratio(seconds[a], seconds[b]).show("{:.3f}")) for a, b in pairs]
        if rows:
            parts.append(table(("ratio of step times", "median (quartiles)"), rows))
    return parts


def headlines(results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README: step time, pipeloom over its peers."""
    return {
        f"{label}: {a} / {b}": ratio(result["seconds"][a], result["seconds"][b])
        for label, result in results.items()
        for a, b in COMPARISONS
        if a in result["seconds"] and b in result["seconds"]
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step_time", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a system in a round")
    parser.add_argument("--configurations", nargs="+", choices=CONFIGURATIONS, default=list(CONFIGURATIONS))
    installed = [name for name in ENTRIES if ENTRIES[name].system.kind != "deepspeed" or find_spec("deepspeed")]
    parser.add_argument("--systems", nargs="+", choices=ENTRIES, default=installed)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "step_time.json")
    arguments = parser.parse_args()
    if "pipeloom auto" in arguments.systems:
        try:
            find_cluster("local", "cluster")
        except InputError as error:
            parser.error(str(error))
    machine = environment()
    results = {}
    for label in arguments.configurations:
        results[label] = measure(CONFIGURATIONS[label], arguments.systems, arguments.rounds, arguments.steps)
        print(markdown(tables({label: results[label]})), flush=True)
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "num_ranks": NUM_RANKS}
    save(arguments.output, settings, machine, results, tables(results), headlines(results))


if __name__ == "__main__":
    main()
