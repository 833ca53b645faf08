"""Rounds of waiting stages: one crew of `num_ranks` processes that holds all systems and runs them in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.systems import Bench, System, build_checked, step_seconds
from benchmarks.common.workloads import WaitingWorkload

FORWARD_SECONDS, BACKWARD_SECONDS = 0.010, 0.020


def waiting_workload(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> WaitingWorkload:
    """Stages such that one rank's share of the model takes 10 ms forward and 20 ms backward."""
    return WaitingWorkload(
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        forward_seconds=FORWARD_SECONDS / num_chunks,
        backward_seconds=BACKWARD_SECONDS / num_chunks,
    )


def measure_waiting(
    num_ranks: int, num_microbatches: int, systems: Mapping[str, System], num_rounds: int
) -> dict[str, Any]:
    """The seconds of every step, by system, and the largest error of each against the reference.

    ``"bare_seconds"`` is what F and B of one micro-batch on one stage take without any pipeline, autograd included.
    """
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        with Crew(f"{num_ranks} ranks", num_ranks, Bench, num_ranks, scratch) as crew:
            errors = {}
            for name, system in systems.items():
                workload = waiting_workload(num_ranks, num_microbatches, (system.options or {}).get("num_chunks", 1))
                reference = Path(scratch) / f"{workload.num_stages}.safetensors"
                if not reference.exists():
                    write_reference(workload, reference)
                errors[name] = build_checked(crew, name, system, workload, reference)
            seconds: dict[str, list[float]] = {name: [] for name in systems}
            for _ in range(num_rounds):
                for name in systems:
                    seconds[name] += step_seconds(crew.call("run_steps", name, 1))
        with Crew("bare", 1, Bench, 1, scratch, process_group=False) as alone:
            alone.call("build", "bare", System(kind="bare"), waiting_workload(1, num_microbatches))
            (stamps,) = alone.call("run_steps", "bare", 2)
    warm = stamps[-1]
    bare_seconds = (warm.end - warm.start) / num_microbatches
    return {"errors": errors, "seconds": seconds, "bare_seconds": bare_seconds}
