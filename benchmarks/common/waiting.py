"""Every schedule on stages that wait: real processes, and the same program in the simulator."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pipeloom as pl
from benchmarks.common.peers import TORCH_SCHEDULES
from benchmarks.common.ping_pong import one_way_seconds
from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.systems import Bench, System, build_checked, step_seconds
from benchmarks.common.workloads import WaitingWorkload
from pipeloom.ir import Placement, Program, Schedule
from pipeloom.passes import lower, merge_backwards, separate_units
from pipeloom.schedules import FAMILIES, Conditions
from pipeloom.sim import Timeline, measured_timeline

# Of one micro-batch on one stage.
SECONDS = {"forward": 0.010, "backward_input": 0.010, "backward_weight": 0.010}
_MESSAGES = 25  # of each rank and round, to see what they take


def waiting_workload(num_stages: int, num_microbatches: int) -> WaitingWorkload:
    """Stages that take `SECONDS`."""
    f, i, w = SECONDS.values()
    return WaitingWorkload(num_stages=num_stages, num_microbatches=num_microbatches, seconds=(f, i, w))


def waiting_schedule(name: str, num_ranks: int, num_microbatches: int, latency_seconds: float = 0.0) -> Schedule:
    """The schedule `name` for these stages and links."""
    chunks = FAMILIES[name].default_chunks
    share = {what: chunks * seconds for what, seconds in SECONDS.items()}
    conditions = Conditions.uniform(Placement.loop(num_ranks, chunks), **share, latency=latency_seconds)
    return pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches, conditions=conditions)


def waiting_systems(
    names: Iterable[str], num_ranks: int, num_microbatches: int, latency_seconds: float | None = None
) -> dict[str, System]:
    """Each schedule in pipeloom, without latency over plain pipes and, where torch has it too, in torch."""
    systems = {}
    for name in names:
        schedule = waiting_schedule(name, num_ranks, num_microbatches, latency_seconds or 0.0)
        systems[f"pipeloom {name}"] = System(kind="pipeloom", schedule=schedule, latency_seconds=latency_seconds)
        if latency_seconds is None:
            systems[f"pipes {name}"] = System(kind="pipes", schedule=lower(ran(schedule)))
        if name in TORCH_SCHEDULES:
            systems[f"torch {name}"] = System(kind="torch", schedule=name, latency_seconds=latency_seconds)
    return systems


def ran(schedule: Schedule) -> Schedule:
    """What the runtime makes of `schedule`."""
    return separate_units(merge_backwards(schedule))


def simulated(schedule: Schedule, latency_seconds: float = 0.0) -> Timeline:
    """The timeline of the program that the runtime makes of `schedule`."""
    costs = pl.Costs(**{what: (seconds,) * schedule.num_stages for what, seconds in SECONDS.items()})
    return pl.simulate(lower(ran(schedule)), costs, pl.Network(latency_seconds=latency_seconds))


def measure_waiting(
    num_ranks: int, num_microbatches: int, systems: Mapping[str, System], num_rounds: int
) -> dict[str, Any]:
    """Rounds of one crew of `num_ranks` processes that holds all systems and runs them in turn.

    Returns:
        ``errors``: of each system, the largest against the reference; ``seconds``: of each system, of every step;
        ``bubbles``: of each pipeloom system, the bubble of every step's measured timeline; ``message_seconds``: what
        messages took by themselves, in the same rounds, see `one_way_seconds`; ``bare_seconds``: what F and B of one
        micro-batch on one stage take without any pipeline, autograd included; ``urgent``: whether the processes were
        allowed to run before all others of the machine.
    """
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = defaultdict(list)
    bubbles: dict[str, list[float]] = defaultdict(list)
    message_seconds: list[float] = []
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        with Crew(f"{num_ranks} ranks", num_ranks, Bench, num_ranks, scratch) as crew:
            for name, system in systems.items():
                schedule = system.schedule
                if isinstance(schedule, Program):
                    schedule = schedule.schedule
                elif not isinstance(schedule, Schedule):
                    schedule = waiting_schedule(schedule, num_ranks, num_microbatches)
                workload = waiting_workload(schedule.num_stages, num_microbatches)
                reference = Path(scratch) / f"{workload.num_stages}.safetensors"
                if not reference.exists():
                    write_reference(workload, reference)
                errors[name] = build_checked(crew, name, system, workload, reference)
            _say(f"{num_ranks} ranks: {len(errors)} systems agree with the reference")
            urgent = all(crew.call("run_first"))
            for round_number in range(num_rounds):
                message_seconds += one_way_seconds(crew.call("ping_pong", _MESSAGES, SECONDS["forward"]))
                for name, system in systems.items():
                    seconds[name] += step_seconds(crew.call("run_steps", name, 1))
                    if isinstance(system.schedule, Schedule):
                        timeline = measured_timeline(ran(system.schedule), crew.call("records", name))
                        bubbles[name].append(timeline.bubble_fraction)
                _say(f"{num_ranks} ranks: round {round_number + 1} of {num_rounds}")
        with Crew("bare", 1, Bench, 1, scratch, process_group=False) as alone:
            alone.call("build", "bare", System(kind="bare"), waiting_workload(1, num_microbatches))
            alone.call("run_first")
            (stamps,) = alone.call("run_steps", "bare", 2)
    warm = stamps[-1]
    bare_seconds = (warm.end - warm.start) / num_microbatches
    return {
        "errors": errors,
        "seconds": seconds,
        "bubbles": bubbles,
        "message_seconds": message_seconds,
        "bare_seconds": bare_seconds,
        "urgent": urgent,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
