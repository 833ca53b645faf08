"""PipeDream's findings on VGG-16 and ResNet-50, how fast the planners are, and DAPPLE's formula against simulation."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, median
from time import process_time
from typing import Any

from benchmarks.common.report import Table, environment, markdown, save, table
from benchmarks.partition.networks import read_cluster, resnet50, vgg16

from pipeloom.plan.partition import Partition, Profile, data_parallel, partition_layers, partition_synchronous
from pipeloom.schedules import dapple_pb, one_f_one_b

RANKS = 16
NETWORKS = {"VGG-16": (vgg16, 64), "ResNet-50": (resnet50, 128)}  # images of a minibatch, as in the paper
EFFICIENCIES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
FORMS = ("published", "summed")


def findings(efficiencies: Sequence[float | None]) -> list[dict[str, Any]]:
    """Partitions over 16 ranks of both networks, on both clusters, by both forms; None: the cluster's efficiency."""
    results = []
    for name, (network, batch) in NETWORKS.items():
        for letter in "ab":
            cluster = read_cluster(letter)
            levels = [(RANKS, cluster.between_nodes.bytes_per_second)]
            for form in FORMS:
                for efficiency in efficiencies:
                    used = cluster.efficiency if efficiency is None else efficiency
                    profile = network(replace(cluster, efficiency=used), batch)
                    found = partition_layers(profile, levels, form=form)
                    together = data_parallel(profile, levels, form=form)
                    results.append(
                        {
                            "network": name,
                            "cluster": letter.upper(),
                            "form": form,
                            "efficiency": used,
                            "replicas": [stage.replicas for stage in found.stages],
                            "begins": [profile.layers[stage.first].name for stage in found.stages],
                            "period_seconds": found.period_seconds,
                            "bottleneck": f"{found.bottleneck.kind} {found.bottleneck.stage}",
                            "data_parallel_seconds": together.period_seconds,
                        }
                    )
    return results


def draw(rng: random.Random, num_layers: int) -> Profile:
    """Layers of any size."""
    return Profile.of(
        (f"layer {k}", rng.uniform(0.1, 1), rng.uniform(0.1, 2), rng.uniform(1e6, 1e8), rng.uniform(1e6, 1e8))
        for k in range(num_layers)
    )


def speed(num_layers: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of processor time that the planners take for 64 ranks; medians."""
    rng = random.Random(0)
    profiles = [draw(rng, num_layers) for _ in range(rounds)]
    clusters = {
        "flat": [(64, 1e9)],
        "8 nodes of 8": [(8, 1e10), (8, 1e9)],
        "4 x 4 x 4": [(4, 1e10), (4, 1e9), (4, 1e8)],
    }
    results = []
    for name, levels in clusters.items():
        found, free = _timed(profiles, levels, [None] * rounds)
        _, capped = _timed(profiles, levels, [0.8 * each.memory_bytes for each in found])
        results.append({"cluster": name, "seconds": free, "capped_seconds": capped})
    start = process_time()
    partition_synchronous(profiles[0], ranks=64, bandwidth=1e9, num_microbatches=64)
    results.append({"cluster": "flat, DAPPLE", "seconds": process_time() - start, "capped_seconds": None})
    return results


def _timed(
    profiles: Sequence[Profile], levels: list[tuple[int, float]], caps: Sequence[float | None]
) -> tuple[list[Partition], float]:
    found, seconds = [], []
    for profile, cap in zip(profiles, caps, strict=True):
        start = process_time()
        found.append(partition_layers(profile, levels, memory_cap=cap))
        seconds.append(process_time() - start)
    return found, median(seconds)


def accuracy(plans: int) -> list[dict[str, Any]]:
    """How far DAPPLE's formula is from the simulation of its own plans."""
    results = []
    for schedule, published in product((one_f_one_b, dapple_pb), (False, True)):
        errors, steps = [], []
        for seed in range(plans):
            rng = random.Random(seed)
            profile, ranks = draw(rng, rng.randint(4, 24)), rng.randint(2, 12)
            bandwidth, count = 10 ** rng.uniform(7.5, 9), rng.randint(2, 32)
            plan = partition_synchronous(
                profile, ranks=ranks, bandwidth=bandwidth, num_microbatches=count, published=published
            )
            steps.append(plan.simulate(schedule))
            errors.append(plan.step_seconds / steps[-1] - 1)
        results.append(
            {
                "schedule": schedule.__name__,
                "pivot": "the paper's" if published else "any",
                "mean_step_seconds": mean(steps),
                "plans": plans,
                "exact": sum(abs(error) < 1e-9 for error in errors),
                "mean": mean(errors),
                "lowest": min(errors),
                "highest": max(errors),
            }
        )
    return results


def _rows(results: list[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            each["network"],
            each["cluster"],
            each["form"],
            "-".join(map(str, each["replicas"])),
            ", ".join(each["begins"][1:]) or "-",
            f"{1e3 * each['period_seconds']:.1f}",
            each["bottleneck"],
            f"{each['data_parallel_seconds'] / each['period_seconds']:.2f}",
        ]
        for each in results
    ]


def _sweep(results: list[dict[str, Any]]) -> Table:
    keys = list(dict.fromkeys((each["network"], each["cluster"], each["form"]) for each in results))
    rows = [
        [*key, *("-".join(map(str, e["replicas"])) for e in results if (e["network"], e["cluster"], e["form"]) == key)]
        for key in keys
    ]
    return table(["network", "cluster", "form", *map(str, EFFICIENCIES)], rows)


def _accuracy(results: list[dict[str, Any]]) -> Table:
    header = ["simulated as", "pivot", "mean step, s", "plans", "exact", "mean %", "lowest %", "highest %"]
    rows = []
    for each in results:
        errors = (f"{100 * each[key]:.1f}" for key in ("mean", "lowest", "highest"))
        step = f"{each['mean_step_seconds']:.2f}"
        rows.append([each["schedule"], each["pivot"], step, each["plans"], each["exact"], *errors])
    return table(header, rows)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partition", description=__doc__)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", type=int, default=400)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "partition.json")
    options = parser.parse_args()
    machine = environment()
    found, swept = findings([None]), findings(EFFICIENCIES)
    timed, off = speed(options.layers, options.rounds), accuracy(options.plans)
    header = [
        "network",
        "cluster",
        "form",
        "replicas",
        "later stages begin with",
        "ms",
        "bottleneck",
        "data parallel / it",
    ]
    parts = [
        table(header, _rows(found)),
        _sweep(swept),
        table(
            [f"{options.layers} layers, 64 ranks", "seconds", "with a memory cap"],
            [
                [
                    e["cluster"],
                    f"{e['seconds']:.2f}",
                    "" if e["capped_seconds"] is None else f"{e['capped_seconds']:.2f}",
                ]
                for e in timed
            ],
        ),
        _accuracy(off),
    ]
    print(markdown(parts))
    results = {"findings": found, "efficiencies": swept, "speed": timed, "accuracy": off}
    save(options.output, {"layers": options.layers, "rounds": options.rounds}, machine, results, parts)


if __name__ == "__main__":
    main()
