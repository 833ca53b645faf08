"""How good are the schedules that the search finds, beside the best named ones and a bound that nobody beats?

Random heterogeneous instances: 2 to 8 ranks, 1 to 32 micro-batches, uneven stages, links and memory, some with a fat
last stage, a slow rank or very uneven memory; caps from what one micro-batch needs to more than enough; stages in a
loop (one or two a rank) or in a V.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.report import environment, markdown, save, table
from benchmarks.common.statistics import spread

from pipeloom import schedules
from pipeloom.ir import Placement, check
from pipeloom.schedules import Conditions
from pipeloom.sim import Costs, Network, simulate

KINDS = {"loop": (1, Placement.loop), "loop of two": (2, Placement.loop), "V": (2, Placement.v)}
CAPS = ("tight", "half", "1F1B's", "loose")
UNEVEN = ("stages", "fat last stage", "slow rank", "memory")
_SMALL = 100  # actions up to which CP-SAT is asked


def instance(seed: int) -> tuple[str, str, str, Placement, int, Conditions]:
    """Kind, caps, what is uneven beyond chance, placement, micro-batches and conditions of one instance."""
    rng = random.Random(seed)
    ranks, microbatches = rng.randint(2, 8), rng.randint(1, 32)
    kind, caps, uneven = rng.choice(list(KINDS)), rng.choice(CAPS), rng.choice(UNEVEN)
    chunks, shape = KINDS[kind]
    placement = shape(ranks, chunks)
    slower = [1.0] * placement.num_stages
    if uneven == "fat last stage":
        slower[-1] = rng.uniform(1.5, 3.0)
    elif uneven == "slow rank":
        factor = rng.uniform(1.3, 2.0)
        for stage in placement.stages_of[rng.randrange(ranks)]:
            slower[stage] = factor

    def some(low: float, high: float, count: int = placement.num_stages) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(count))

    def times(low: float, high: float) -> tuple[float, ...]:
        return tuple(seconds * factor for seconds, factor in zip(some(low, high), slower, strict=True))

    activation = some(0.5, 1.5)
    level = {"tight": 1.0, "half": ranks / 2, "1F1B's": ranks, "loose": math.inf}[caps]
    needed = [sum(activation[s] for s in held) for held in placement.stages_of]  # by one micro-batch
    spread_of_caps = 3.0 if uneven == "memory" else 1.5
    conditions = Conditions(
        forward=times(0.5, 1.5),
        backward_input=times(0.5, 1.5),
        backward_weight=times(0.3, 1.2),
        latency=tuple(some(0.0, 0.2, ranks) for _ in range(ranks)),
        activation=activation,
        weight_gradient=tuple(kept * rng.uniform(0.2, 0.8) for kept in activation),
        caps=tuple(need * max(1.0, level) * rng.uniform(1.0, spread_of_caps) for need in needed),
    )
    return kind, caps, uneven, placement, microbatches, conditions


def answer(seed: int, prove_seconds: float = 0.0) -> dict[str, Any]:
    """Search one instance and check the answer: legal, within the caps, as long as it says, never above the best."""
    kind, caps, uneven, placement, microbatches, conditions = instance(seed)
    start = time.perf_counter()
    found = schedules.search(placement=placement, num_microbatches=microbatches, conditions=conditions)
    seconds = time.perf_counter() - start
    check(found.schedule)
    costs = Costs(
        forward=conditions.forward,
        backward_input=conditions.backward_input,
        backward_weight=conditions.backward_weight,
        activation_bytes=conditions.activation,
        weight_gradient_bytes=conditions.weight_gradient,
    )
    timeline = simulate(found.schedule, costs, Network(latency_seconds=conditions.latency))
    if not math.isclose(timeline.makespan, found.makespan, rel_tol=1e-9):
        raise SystemExit(f"instance {seed}: simulated {timeline.makespan}, claimed {found.makespan}")
    for peak, cap in zip(timeline.peak_bytes or (), conditions.caps, strict=True):
        if peak > cap * (1 + 1e-6):
            raise SystemExit(f"instance {seed}: holds {peak}, the cap is {cap}")
    if found.best_named is not None and found.makespan > found.best_named[1] * (1 + 1e-9):
        raise SystemExit(f"instance {seed}: {found.makespan}, but {found.best_named} is shorter")
    return {
        "seed": seed,
        "kind": kind,
        "caps": caps,
        "uneven": uneven,
        "ranks": placement.num_ranks,
        "microbatches": microbatches,
        "makespan": found.makespan,
        "best_named": found.best_named,
        "lower_bound": found.lower_bound,
        "seconds": seconds,
        "proved": _proved(found, conditions, prove_seconds),
    }


def _proved(found: schedules.Found, conditions: Conditions, seconds: float) -> dict[str, float] | None:
    """CP-SAT's bound and makespan where the instance is small and OR-tools is there."""
    actions = 3 * found.schedule.num_stages * found.schedule.num_microbatches
    if seconds <= 0.0 or actions > _SMALL:
        return None
    proved = schedules.prove(found, conditions=conditions, seconds=seconds)
    return {"makespan": proved.makespan, "lower_bound": proved.lower_bound}


def rows(results: Sequence[dict[str, Any]]) -> list[list[object]]:
    """One row for each kind of placement, level of the caps and unevenness, and one for all."""
    made: list[list[object]] = []
    for name in (*KINDS, *CAPS, *UNEVEN, "all"):
        chosen = [each for each in results if name in (each["kind"], each["caps"], each["uneven"], "all")]
        if not chosen:
            continue
        named = [each for each in chosen if each["best_named"] is not None]
        gains = [100 * (1 - each["makespan"] / each["best_named"][1]) for each in named]
        gaps = [100 * (each["makespan"] / each["lower_bound"] - 1) for each in chosen]
        made.append(
            [
                name,
                len(chosen),
                len(chosen) - len(named),
                spread(gains).show() if gains else "-",
                sum(gain > 0.01 for gain in gains),
                spread(gaps).show(),
                sum(gap < 1e-6 for gap in gaps),
                spread([each["seconds"] for each in chosen]).show(),
            ]
        )
    return made


def said_of_small(results: Sequence[dict[str, Any]]) -> str:
    """How far the search is from what CP-SAT found and proved."""
    small = [each for each in results if each["proved"] is not None]
    if not small:
        return "CP-SAT was not asked (see --prove)."
    gaps = [100 * (each["makespan"] / each["proved"]["lower_bound"] - 1) for each in small]
    better = sum(each["proved"]["makespan"] < each["makespan"] * (1 - 1e-9) for each in small)
    return (
        f"CP-SAT on the {len(small)} instances of at most {_SMALL} actions: {sum(gap < 1e-4 for gap in gaps)} searched "
        f"steps proved shortest to 1e-6, the others at most {max(gaps):.2f} % above its bound; it found a shorter one "
        f"for {better}."
    )


def main() -> None:
    """Search all instances and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "search.json")
    parser.add_argument("--prove", type=float, default=0.0, help="seconds for which CP-SAT proves each small instance")
    options = parser.parse_args()
    machine = environment()
    results = [answer(seed, options.prove) for seed in range(options.instances)]
    header = ["", "instances", "no named fits", "gain %", "gained", "above the bound %", "proved best", "seconds"]
    parts = [table(header, rows(results)), said_of_small(results)]
    print(markdown(parts))
    save(options.output, {"instances": options.instances}, machine, results, parts)


if __name__ == "__main__":
    main()
