"""What a library adds to each action: stages that compute next to nothing, minus the bare calls they consist of.

Overhead is CPU time of the ranks' main threads (waiting for a message costs none) minus that of the same module and
autograd calls done bare, over the number of actions.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import spread
from benchmarks.common.systems import Bench, System, build_checked, step_seconds
from benchmarks.common.workloads import TinyWorkload

import pipeloom as pl


class Case(NamedTuple):
    """A system and where it runs."""

    num_ranks: int
    num_processes: int
    system: System


CASES = {
    "bare, 1 stage": Case(1, 1, System(kind="bare")),
    "bare, 2 stages": Case(2, 1, System(kind="bare")),
    "pipeloom, 1 rank": Case(1, 1, System(kind="pipeloom", schedule="1f1b", options={"transport": "loopback"})),
    "torch, 1 rank": Case(1, 1, System(kind="torch", schedule="1f1b")),
    "pipeloom, 2 ranks, loopback": Case(
        2, 1, System(kind="pipeloom", schedule="1f1b", options={"transport": "loopback"})
    ),
    "pipeloom, 2 ranks, shared memory": Case(
        2, 2, System(kind="pipeloom", schedule="1f1b", options={"spin_seconds": 0.0})
    ),
    "pipeloom, 2 ranks, shared memory, spinning": Case(2, 2, System(kind="pipeloom", schedule="1f1b")),
    "pipeloom, 2 ranks, gloo": Case(2, 2, System(kind="pipeloom", schedule="1f1b", options={"transport": "torch"})),
    "torch, 2 ranks, gloo": Case(2, 2, System(kind="torch", schedule="1f1b")),
    "deepspeed, 2 ranks, gloo": Case(2, 2, System(kind="deepspeed")),
}
BARE = {1: "bare, 1 stage", 2: "bare, 2 stages"}


def program_actions(num_ranks: int, num_microbatches: int) -> int:
    """Actions of all ranks, sends and receives included."""
    schedule = pl.schedules.one_f_one_b(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return sum(len(order) for order in pl.passes.insert_communication(schedule).orders)


def measure(names: list[str], num_microbatches: int, num_rounds: int, num_steps: int) -> dict[str, Any]:
    """For each case, per round the mean of its steps: CPU of main threads, CPU of processes, wall; in seconds."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch, ExitStack() as stack:
        crews = {}
        for name in names:
            case = CASES[name]
            group = case.num_processes > 1 or case.system.kind == "torch"
            crew = Crew(name, case.num_processes, Bench, case.num_ranks, scratch, process_group=group)
            crews[name] = stack.enter_context(crew)
        for name, crew in crews.items():
            workload = TinyWorkload(num_stages=CASES[name].num_ranks, num_microbatches=num_microbatches)
            reference = Path(scratch) / f"{workload.num_stages}.safetensors"
            write_reference(workload, reference)
            error = build_checked(crew, name, CASES[name].system, workload, reference)
            results[name] = {"error": error, "thread_cpu": [], "process_cpu": [], "wall": []}
        for _ in range(num_rounds):
            for name, crew in crews.items():
                stamps = crew.call("run_steps", name, 2 + num_steps)
                steps = list(zip(*stamps, strict=True))[2:]
                results[name]["thread_cpu"].append(sum(s.thread_cpu for step in steps for s in step) / num_steps)
                results[name]["process_cpu"].append(sum(s.process_cpu for step in steps for s in step) / num_steps)
                results[name]["wall"].append(sum(step_seconds(stamps)[2:]) / num_steps)
    return results


def tables(results: dict[str, Any], num_microbatches: int) -> Parts:
    rows = []
    for name, result in results.items():
        num_ranks = CASES[name].num_ranks
        bare = spread(results[BARE[num_ranks]]["thread_cpu"]).median
        compute = 2 * num_ranks * num_microbatches
        every = program_actions(num_ranks, num_microbatches)

        def overhead(key: str, count: int, result: Any = result, bare: float = bare) -> str:
            return spread([(cpu - bare) / count for cpu in result[key]]).show("{:.1f}", 1e6)

        is_bare = name in BARE.values()
        rows.append(
            (
                name,
                "" if is_bare else overhead("thread_cpu", compute),
                "" if is_bare else overhead("thread_cpu", every),
                "" if is_bare else overhead("process_cpu", compute),
                spread(result["thread_cpu"]).show("{:.1f}", 1e6 / compute),
                spread(result["wall"]).show("{:.0f}", 1e6),
            )
        )
    header = (
        "case",
        "us over bare, per F or B",
        "per action of the program",
        "per F or B, all threads",
        "us CPU per F or B",
        "us wall a step",
    )
    return [table(header, rows), f"M={num_microbatches} micro-batches per step; median (quartiles) over rounds."]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.action_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a case in a round")
    parser.add_argument("--microbatches", type=int, default=64)
    installed = [name for name in CASES if CASES[name].system.kind != "deepspeed" or find_spec("deepspeed")]
    parser.add_argument("--cases", nargs="+", choices=CASES, default=installed)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "action_overhead.json")
    arguments = parser.parse_args()
    machine = environment()
    names = [name for name in CASES if name in arguments.cases or name in BARE.values()]
    results = measure(names, arguments.microbatches, arguments.rounds, arguments.steps)
    parts = tables(results, arguments.microbatches)
    print(markdown(parts))
    settings = {"rounds": arguments.rounds, "steps": arguments.steps, "microbatches": arguments.microbatches}
    save(arguments.output, settings, machine, results, parts)


if __name__ == "__main__":
    main()
