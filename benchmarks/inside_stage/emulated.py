"""Layouts on emulated devices: the simulator's step beside the real program's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.inside_stage.subject import Subject, Work, reference_losses

import pipeloom as pl
from pipeloom.models import GPTConfig
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.passes import lower, merge_backwards, separate_units
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.stage_times import StageTimes

LAYERS, SAMPLES, MICROBATCHES, LENGTH, WIDTH = 2, 4, 4, 64, 32
LINK = LinkRate(bytes_per_second=4e6, latency_seconds=6e-4)
# Arithmetic of a block's forward over all processes of a stage, and how long it takes them.
_OPERATIONS, _SECONDS = 2 * SAMPLES * LENGTH * (12 * WIDTH**2 + LENGTH * WIDTH), 0.080
TOLERANCE = 1e-5  # of losses


def work_of(inside: InsideStage, num_ranks: int, schedule: str) -> Work:
    """A small GPT, with one or two blocks per stage."""
    config = GPTConfig(vocabulary_size=64, layers=LAYERS, width=WIDTH, heads=8, sequence_length=LENGTH)
    made = pl.schedules.build(schedule, num_ranks=num_ranks, num_microbatches=MICROBATCHES)
    return Work(config, SAMPLES, made, inside)


def stage_times(work: Work) -> StageTimes:
    """What `pipeloom simulate --model` computes of a cluster of the emulated devices."""
    free, link = 1e30, LINK.bytes_per_second or 0.0
    rate = _OPERATIONS / work.inside.processes / _SECONDS
    device = Device(name="emulated", operations_per_second=rate, memory_bytes_per_second=free, launch_seconds=0.0)
    cluster = Cluster(
        name="emulated",
        devices_per_node=work.inside.processes,
        device=device,
        inside_node=NodeLinks(bytes_per_second=link, pair_bytes_per_second=link, latency_seconds=LINK.latency_seconds),
        between_nodes=NodeNetwork(bytes_per_second=free, latency_seconds=0.0),
        efficiency=1.0,
    )
    model = Architecture.of_gpt(work.config)
    return StageTimes(model=model, inside=work.inside, cluster=cluster, samples=work.samples, element=4)


def predicted_seconds(work: Work, *, collectives: bool = True) -> float:
    """Seconds of a step by the simulator; `collectives`: whether they take time."""
    times, count = stage_times(work), work.schedule.num_stages
    if not collectives:
        times = replace(
            times,
            cluster=replace(
                times.cluster,
                inside_node=NodeLinks(bytes_per_second=1e30, pair_bytes_per_second=1e30, latency_seconds=0.0),
            ),
        )
    stages = times.stages([LAYERS // count] * count)
    costs = pl.Costs(
        forward=tuple(each.forward for each in stages),
        backward_input=tuple(each.backward_input for each in stages),
        backward_weight=tuple(each.backward_weight for each in stages),
    )
    return pl.simulate(lower(separate_units(merge_backwards(work.schedule))), costs).makespan


def measure(name: str, work: Work, rounds: int) -> dict[str, Any]:
    """Steps of one layout in one crew."""
    device = stage_times(work).cluster.device.operations_per_second, LINK
    ranks = work.schedule.num_ranks
    with Crew(name, ranks * work.inside.processes, Subject, work, device) as crew:
        crew.call("build", "real")
        losses, expected = crew.call("losses", 2)[0], reference_losses(work, 2)
        error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if error > TOLERANCE:
            raise SystemExit(f"{name}: losses are {error:.1e} from those of one process")
        crew.call("run_first")
        seconds = []
        for _ in range(rounds):
            stamps = crew.call("step", "real")
            seconds.append(max(end for _, end in stamps) - min(start for start, _ in stamps))
    return {
        "error": error,
        "seconds": seconds,
        "predicted": predicted_seconds(work),
        "without_collectives": predicted_seconds(work, collectives=False),
        "processes": ranks * work.inside.processes,
    }
