"""One checkout's part of the comparison: builds its systems once, then runs one round for each line on stdin.

Run as a file with the checkout and its `src` on PYTHONPATH, so that `benchmarks` and `pipeloom` are that checkout's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.action_overhead.__main__ import BARE, CASES
from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.systems import Bench, build_checked, step_seconds
from benchmarks.common.workloads import TinyWorkload
from benchmarks.simulator.__main__ import SIZES, measure
from benchmarks.step_time.__main__ import CONFIGURATIONS, ENTRIES

STEP_SYSTEMS = ("pipeloom 1f1b", "pipeloom gpipe")
OVERHEAD_CASES = ("pipeloom, 1 rank", "pipeloom, 2 ranks, loopback", "pipeloom, 2 ranks, shared memory")
MICROBATCHES = 64


class Subject:
    """Everything that one checkout is asked to measure."""

    def __init__(self, stack: ExitStack, wanted: list[str]) -> None:
        self._stack, self._wanted = stack, wanted
        self._scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-"))
        self._steps: dict[str, Crew] = {}
        self._cases: dict[str, Crew] = {}
        for configuration in CONFIGURATIONS:
            if configuration in wanted:
                self._build_step_time(configuration)
        if "action_overhead" in wanted:
            self._build_overhead()

    def _crew(self, name: str, processes: int, ranks: int, group: bool) -> Crew:
        crew = Crew(name, processes, Bench, ranks, self._scratch, process_group=group)
        return self._stack.enter_context(crew)

    def _build_step_time(self, configuration: str) -> None:
        workload = CONFIGURATIONS[configuration]
        reference = Path(self._scratch) / f"{configuration.replace(' ', '-')}.safetensors"
        write_reference(workload, reference)
        for system in STEP_SYSTEMS:
            name = f"{configuration}, {system.removeprefix('pipeloom ')}"
            entry = ENTRIES[system]
            crew = self._crew(name, entry.num_processes, entry.num_ranks, entry.num_processes > 1)
            build_checked(crew, name, entry.system, workload, reference)
            self._steps[name] = crew

    def _build_overhead(self) -> None:
        for name in (*BARE.values(), *OVERHEAD_CASES):
            case = CASES[name]
            workload = TinyWorkload(num_stages=case.num_ranks, num_microbatches=MICROBATCHES)
            reference = Path(self._scratch) / f"tiny-{case.num_ranks}.safetensors"
            write_reference(workload, reference)
            crew = self._crew(name, case.num_processes, case.num_ranks, case.num_processes > 1)
            build_checked(crew, name, case.system, workload, reference)
            self._cases[name] = crew

    def round(self) -> dict[str, float]:
        """Seconds (of overhead: microseconds per F or B above the bare calls), by what was measured."""
        found: dict[str, float] = {}
        for name, crew in self._steps.items():
            seconds = sorted(step_seconds(crew.call("run_steps", name, 4))[1:])
            found[f"step time, {name}"] = seconds[len(seconds) // 2]
        cpu = {name: self._thread_cpu(name, crew) for name, crew in self._cases.items()}
        for name in OVERHEAD_CASES if self._cases else ():
            ranks = CASES[name].num_ranks
            found[f"CPU per F or B, {name.removeprefix('pipeloom, ')}"] = cpu[name] / (2 * ranks * MICROBATCHES)
        if "simulator" in self._wanted:
            for size in SIZES[2:]:
                for part, values in measure(size, 1).items():
                    if part in ("build", "check", "simulate", "all"):
                        found[f"simulator, {size}, {part}"] = values[0]
        return found

    @staticmethod
    def _thread_cpu(name: str, crew: Crew) -> float:
        steps = list(zip(*crew.call("run_steps", name, 22), strict=True))[2:]
        return float(sum(stamp.thread_cpu for step in steps for stamp in step)) / len(steps)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a benchmark prints does not get between the answers
    with ExitStack() as stack:
        subject = Subject(stack, sys.argv[1:])
        answer: Any = "ready"
        while True:
            print(json.dumps(answer), file=answers, flush=True)
            if not sys.stdin.readline().strip():
                return
            answer = subject.round()


if __name__ == "__main__":
    main()
