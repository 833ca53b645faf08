"""How long the slicer looks for slices, on costs without and with the noise of measuring."""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from benchmarks.common.equal_work import equal_work
from benchmarks.common.report import Parts, environment, markdown, save, table

from pipeloom.plan.slicing import Sample, SliceCosts, Slicing, fit, slice_batch, slicing_timeline, uniform

GRID = 8
SEQUENCES = (2048, 8192)
RANKS = (2, 4, 8, 16, 48, 96)
NOISES = (0.0, 0.05, 0.3)
SHORT = (64, 256)  # tokens below which a slice takes as long as one of them


def costs(noise: float, short: int, seed: int) -> SliceCosts:
    """Fitted to measurements that are off by up to `noise`, forward and backward each by their own."""
    rng = random.Random(seed)

    def direction(scale: float) -> list[Sample]:
        def sample(length: int, context: int) -> Sample:
            true = 1e-3 * max(length, short) / short + length * (length / 2 + context) * 1e-9
            return Sample(length, context, scale * true * rng.uniform(1 - noise, 1 + noise))

        lengths = sorted({round(8 * 1.5**step) for step in range(17)} | {8192})
        behind = [(length, context) for length in (128, 512, 2048) for context in (2048, 4096, 6144)]
        return [sample(length, 0) for length in lengths] + [sample(*each) for each in behind]

    forward, backward = (fit(direction(scale))[0] for scale in (1.0, 2.0))
    return SliceCosts(forward=forward, backward=backward, latency=1e-4, seconds_per_token_sent=1e-8)


def check(found: Slicing, costs: SliceCosts, sequence: int) -> None:
    """What is said is what the slices take, and nothing even is better by more than is allowed."""
    seconds = slicing_timeline(costs, found.slices, num_ranks=found.num_ranks).makespan
    assert abs(seconds - found.predicted_seconds) <= 1e-9 * seconds
    for count in (1, 2, 4, 8, 16, 32, 64):
        for other in (
            uniform(sequence=sequence, num_slices=count, multiple=GRID),
            equal_work(sequence=sequence, num_slices=count, width=256, multiple=GRID),
        ):
            assert seconds <= slicing_timeline(costs, [other], num_ranks=found.num_ranks).makespan + found.gap_seconds


def measure(num_seeds: int) -> list[dict[str, Any]]:
    results = []
    for sequence in SEQUENCES:
        for noise in NOISES:
            for num_ranks in RANKS:
                taken, slices = [], []
                for short in SHORT:
                    for seed in range(num_seeds):
                        cost = costs(noise, short, seed)
                        start = time.thread_time()
                        found = slice_batch(cost, sequence=sequence, num_ranks=num_ranks, grid=GRID)
                        taken.append(time.thread_time() - start)
                        check(found, cost, sequence)
                        slices.append(len(found.slices[0]))
                results.append(
                    {"sequence": sequence, "noise": noise, "ranks": num_ranks, "seconds": taken, "slices": slices}
                )
    return results


def tables(results: list[dict[str, Any]]) -> Parts:
    """A row for each sequence and noise: the longest and the mean over all ranks and costs."""
    rows = []
    for sequence in SEQUENCES:
        for noise in NOISES:
            of_row = [one for one in results if (one["sequence"], one["noise"]) == (sequence, noise)]
            seconds = [each for one in of_row for each in one["seconds"]]
            slices = [each for one in of_row for each in one["slices"]]
            mean = sum(seconds) / len(seconds)
            found = f"{min(slices)} to {max(slices)}"
            rows.append((sequence, f"{100 * noise:.0f} %", len(seconds), f"{mean:.3f}", f"{max(seconds):.3f}", found))
    return [table(("tokens", "noise", "searches", "mean seconds", "longest", "slices found"), rows)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.slicer", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "slicer.json")
    arguments = parser.parse_args()
    machine = environment()
    results = measure(arguments.seeds)
    print(markdown(tables(results)))
    save(arguments.output, {"seeds": arguments.seeds}, machine, results, tables(results))


if __name__ == "__main__":
    main()
