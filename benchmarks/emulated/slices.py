"""Sequences in slices on stages that wait as long as the slice would take: real processes beside the simulator."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.equal_work import equal_work
from benchmarks.common.ping_pong import one_way_seconds
from benchmarks.common.processes import Crew
from benchmarks.common.reference import write_reference
from benchmarks.common.report import Parts, Table, table
from benchmarks.common.statistics import ratio, spread
from benchmarks.common.systems import Bench, Record, System, build_checked, step_seconds
from benchmarks.common.workloads import SequenceCosts, WaitingSequences

import pipeloom as pl
from pipeloom.ir import Op, Schedule
from pipeloom.passes import lower
from pipeloom.plan.slicing import slice_for_schedule, uniform

NUM_RANKS = 8
MICROBATCHES = (1, 2)
SEQUENCE = 64  # tokens that each stand for many
WHOLE = "1f1b"
_MESSAGES = 20  # of each rank, in every round
# A forward of 50 ms on a whole sequence: 2 ms of any slice, 24 ms of matrices, 24 ms of attention.
COSTS = SequenceCosts(slice_seconds=0.002, token_seconds=0.024 / SEQUENCE, pair_seconds=0.048 / SEQUENCE**2)


def cuts(num_microbatches: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Of every system, the schedule and the lengths of its slices."""
    found = {name: (name, (SEQUENCE,)) for name in ("gpipe", WHOLE)}
    for name in ("terapipe", "seq1f1b"):
        for count in (4, 8):
            found[f"{name}, {count} even"] = name, uniform(sequence=SEQUENCE, num_slices=count)
        # Matrices and attention take the same for a whole sequence: the width at which arithmetic says so, too.
        found[f"{name}, 8 of equal work"] = name, equal_work(sequence=SEQUENCE, num_slices=8, width=SEQUENCE // 12)
        best = slice_for_schedule(
            COSTS,
            schedule=name,
            sequence=SEQUENCE,
            num_ranks=NUM_RANKS,
            batch=num_microbatches,
            grid=1,
            max_piece=1,
        )
        found[f"{name}, best"] = name, best.slices[0]
    return found


def schedule_of(name: str, lengths: Sequence[int], num_microbatches: int) -> Schedule:
    sliced = {"num_slices": len(lengths)} if len(lengths) > 1 else {}
    return pl.schedules.build(name, num_ranks=NUM_RANKS, num_microbatches=num_microbatches, **sliced)


def simulated_seconds(schedule: Schedule, lengths: Sequence[int], message_seconds: float = 0.0) -> float:
    """Of the program that the runtime makes of `schedule`, with messages that take so long."""
    starts = accumulate(lengths[:-1], initial=0)
    times = [COSTS(1, length, start) for length, start in zip(lengths, starts, strict=True)]
    forward, backward = zip(*times, strict=True)
    factors = tuple(tuple(len(lengths) * each / sum(phase) for each in phase) for phase in (forward, backward))
    costs = pl.Costs(
        forward=sum(forward),
        backward_input=sum(backward) / 2,
        backward_weight=sum(backward) / 2,
        slice_factors=factors,  # type: ignore[arg-type]
    )
    return pl.simulate(lower(schedule), costs, pl.Network(latency_seconds=message_seconds)).makespan


def peak_sequences(records: Sequence[Record], lengths: Sequence[int]) -> float:
    """The most of which a rank held activations at once, in sequences; from what it did when."""
    held = {Op.F: 1, Op.B: -1}
    ran = sorted((start, action) for action, start, _ in records if action.op in held)
    return max(accumulate(held[action.op] * lengths[action.slice or 0] for _, action in ran)) / sum(lengths)


def measure(num_microbatches: int, num_rounds: int) -> dict[str, Any]:
    """Rounds of one crew that holds all systems; results are compared with one process first."""
    workload = WaitingSequences(num_stages=NUM_RANKS, num_microbatches=num_microbatches, sequence=SEQUENCE, costs=COSTS)
    systems = cuts(num_microbatches)
    results: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch,
        Crew("slices", NUM_RANKS, Bench, NUM_RANKS, scratch) as crew,
    ):
        reference = Path(scratch) / "reference.safetensors"
        write_reference(workload, reference)
        for name, (family, lengths) in systems.items():
            schedule = schedule_of(family, lengths, num_microbatches)
            system = System(kind="pipeloom", schedule=schedule, options={"slices": lengths} if len(lengths) > 1 else {})
            results[name] = {
                "error": build_checked(crew, name, system, workload, reference),
                "lengths": lengths,
                "simulated_seconds": simulated_seconds(schedule, lengths),
                "seconds": [],
            }
        print(f"{len(results)} systems agree with the reference", file=sys.stderr, flush=True)
        urgent = all(crew.call("run_first"))
        messages: list[float] = []
        for _ in range(num_rounds):
            messages += one_way_seconds(crew.call("ping_pong", _MESSAGES, COSTS(1, SEQUENCE // 8, 0)[0]))
            for name, result in results.items():
                result["seconds"] += step_seconds(crew.call("run_steps", name, 1))
                peaks = [peak_sequences(rank, result["lengths"]) for rank in crew.call("records", name)]
                result["peaks"] = [max(pair) for pair in zip(result.get("peaks", peaks), peaks, strict=True)]
    for family, lengths, result in ((*systems[name], result) for name, result in results.items()):
        schedule = schedule_of(family, lengths, num_microbatches)
        result["simulated_with_messages_seconds"] = simulated_seconds(schedule, lengths, median(messages))
    return {"systems": results, "urgent": urgent, "message_seconds": messages}


def tables(results: dict[int, Any]) -> Parts:
    """For each number of sequences a table: times simulated and measured, the gain, and the peak of rank 0."""
    header = (
        "system", "simulated ms", "measured ms", "measured / simulated", "simulated with messages",
        "measured / that", f"times {WHOLE}", "sequences held",
    )  # fmt: skip
    parts: list[str | Table] = []
    for count, result in results.items():
        systems = result["systems"]
        rows = [
            [
                name,
                f"{one['simulated_seconds'] * 1e3:.1f}",
                spread(one["seconds"]).show("{:.1f}", 1e3),
                spread([value / one["simulated_seconds"] for value in one["seconds"]]).show("{:.3f}"),
                f"{one['simulated_with_messages_seconds'] * 1e3:.1f}",
                spread([value / one["simulated_with_messages_seconds"] for value in one["seconds"]]).show("{:.3f}"),
                ratio(systems[WHOLE]["seconds"], one["seconds"]).show(),
                f"{max(one['peaks']):.2f}",
            ]
            for name, one in systems.items()
        ]
        lengths = "\n".join(
            f"* {name}: {', '.join(map(str, one['lengths']))}" for name, one in systems.items() if "best" in name
        )
        worst = max(one["error"] for one in systems.values())
        ran = "ran" if result["urgent"] else "could not be made to run"
        parts += [f"### {NUM_RANKS} ranks, {count} sequences per step", table(header, rows), lengths]
        parts.append(
            f"The largest error of a loss or gradient is {worst:.0e}. A message by itself took "
            f"{spread(result['message_seconds']).show('{:.2f}', 1e3)} ms. The processes {ran} before all others of the "
            "machine."
        )
    return parts
