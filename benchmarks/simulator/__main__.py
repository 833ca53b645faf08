"""How many actions a second are built, checked and simulated on one core, beside torch's schedule visualiser?

torch's `get_schedule_ops` builds the actions of a schedule, and with `add_spacing` puts each at its moment, when an F
takes one unit of time and a B two. It checks nothing, and knows no other costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.report import environment, markdown, save, table
from benchmarks.common.statistics import ratio, spread

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, check
from pipeloom.passes import lower
from pipeloom.sim import Costs, simulate


class Size(NamedTuple):
    """A schedule, torch's name of it, and in how many rounds torch is measured: minutes each for the large ones."""

    name: str
    torch_name: str
    ranks: int
    microbatches: int
    chunks: int
    torch_rounds: int = 0

    def __str__(self) -> str:
        return f"{self.name} p={self.ranks} m={self.microbatches} v={self.chunks}"

    def build(self) -> Any:
        return schedules.build(
            self.name, num_ranks=self.ranks, num_microbatches=self.microbatches, num_chunks=self.chunks
        )


SIZES = (
    Size("interleaved", "Interleaved1F1B", 16, 256, 2, 1000),
    Size("zb-v", "ZBVZeroBubble", 16, 256, 2, 1000),
    Size("interleaved", "Interleaved1F1B", 64, 1024, 2, 1),
    Size("interleaved", "", 64, 1024, 4),
    Size("zb-v", "", 64, 1024, 2),
    Size("1f1b", "", 64, 1024, 1),  # torch's visualiser has no F0 on the last rank of 1F1B, and cannot space it
)
SMALL = Size("interleaved", "Interleaved1F1B", 8, 64, 2, 1000)
LARGE = (Size("1f1b", "", 256, 4096, 1), Size("1f1b", "", 1024, 4096, 1), Size("zb-v", "", 256, 4096, 2))


def torch_ops(size: Size, *, spaced: bool) -> Any:
    """torch's actions, rank by rank; it prints a line for each, which is left out."""
    from torch.distributed.pipelining import _schedule_visualizer as visualizer

    visualizer.print = lambda *_: None  # type: ignore[attr-defined]
    return visualizer.get_schedule_ops(size.torch_name, size.ranks, size.microbatches, size.chunks, add_spacing=spaced)


def compare_first(size: Size) -> None:
    """Both sides have the same actions in the same order on every rank."""
    ours = size.build()
    theirs = torch_ops(size, spaced=False)
    for rank, (order, ops) in enumerate(zip(ours.orders, theirs, strict=True)):
        if [*map(str, order)] != [str(op) for op in ops if op is not None and op.microbatch_index is not None]:
            print(f"note: {size}: rank {rank} runs its actions in another order in torch")
            return


def measure(size: Size, num_rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each part, round by round, torch in the same rounds."""
    seconds: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[..., Any], *given: Any) -> Any:
        start = time.process_time()
        result = work(*given)
        seconds.setdefault(what, []).append(time.process_time() - start)
        return result

    for number in range(num_rounds):
        schedule = timed("build", size.build)
        timed("check", check, schedule)
        timed("simulate", lambda made: _numbers(simulate(made, Costs.uniform())), schedule)
        if number < size.torch_rounds:
            timed("torch builds", lambda: torch_ops(size, spaced=False))
            timed("torch builds and spaces", lambda: torch_ops(size, spaced=True))
    seconds["all"] = [sum(parts) for parts in zip(*(seconds[k] for k in ("build", "check", "simulate")), strict=True)]
    return seconds


def _numbers(timeline: Any) -> tuple[float, float, object]:
    return timeline.makespan, timeline.bubble_fraction, timeline.peak_activations


def row(size: Size, seconds: dict[str, list[float]]) -> list[object]:
    """Millions of actions a second, and how many times torch's seconds are ours."""
    actions = sum(map(len, size.build().orders))
    rates = [
        spread([actions / s / 1e6 for s in seconds[what]]).show() for what in ("build", "check", "simulate", "all")
    ]
    ratios = []
    for theirs, ours in (("torch builds", "build"), ("torch builds and spaces", "all")):
        beside = seconds.get(theirs, [])
        ratios.append(ratio(beside, seconds[ours][: len(beside)]).show("{:.1f}") if beside else "-")
    return [str(size), f"{actions:,}", *rates, *ratios]


def in_own_process(size: Size) -> dict[str, float]:
    """Seconds and bytes of a fresh process that builds, checks and simulates; numpy's loading included."""
    code = (
        "import json, re, time, numpy, pipeloom as pl\n"
        "def peak(): return 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        f"size = {size.name!r}, dict(num_ranks={size.ranks}, num_microbatches={size.microbatches})\n"
        "before = peak(); start = time.perf_counter()\n"
        "schedule = pl.schedules.build(size[0], **size[1]); pl.check(schedule)\n"
        "timeline = pl.simulate(schedule, pl.Costs.uniform()); timeline.peak_activations, timeline.makespan\n"
        "print(json.dumps([time.perf_counter() - start, peak() - before, sum(map(len, schedule.orders))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    seconds, used, actions = json.loads(done.stdout)
    words = ["simulate", size.name, "--ranks", str(size.ranks), "--microbatches", str(size.microbatches), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "pipeloom", *words], capture_output=True, check=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "bytes": used, "actions": actions, "command": command}


def _fresh_row(name: str, numbers: dict[str, float]) -> list[object]:
    held = numbers["bytes"] / numbers["actions"]
    return [name, f"{numbers['actions']:,}", f"{numbers['seconds']:.1f}", f"{held:.0f}", f"{numbers['command']:.1f}"]


def grid(largest: Sequence[int] = (4, 128, 64)) -> None:
    """Every family at every (chunks, micro-batches, ranks) up to the largest, all legal ones checked and simulated."""
    most_chunks, most_microbatches, most_ranks = largest
    microbatches = [m for m in (1, 2, 3, 4, 6, 8, 10, 12, 15, 16, 32, 64, 128) if m <= most_microbatches]
    ranks = [p for p in (1, 2, 3, 4, 5, 8, 16, 32, 64) if p <= most_ranks]
    for name, family in schedules.FAMILIES.items():
        if name == "search":
            continue
        chunks = range(1, most_chunks + 1) if family.chunks is None else (family.chunks,)
        legal = 0
        start = time.perf_counter()
        for v, m, p in product(chunks, microbatches, ranks):
            try:
                schedule = schedules.build(name, num_ranks=p, num_microbatches=m, num_chunks=v)
            except ScheduleError:
                continue
            program = lower(schedule, tied_stages=() if family.stream else ((0, schedule.num_stages - 1),))
            costs = Costs.uniform(other={Op.REDUCE_GRAD: 0.5})
            if check(program).live_activations != check(schedule).live_activations:
                raise SystemExit(f"{name} p={p} m={m} v={v}: lowering changed the activations")
            if simulate(program, costs).makespan < simulate(schedule, costs).makespan:
                raise SystemExit(f"{name} p={p} m={m} v={v}: lowering made it shorter")
            legal += 1
        print(f"{name}: {legal} legal sizes check, are lowered and simulate ({time.perf_counter() - start:.0f} s)")


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one small size alone, to see whether it runs")
    parser.add_argument("--grid", action="store_true", help="instead, every size of upstream's plan tests")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "simulator.json")
    options = parser.parse_args()
    if options.grid:
        grid()
        return
    machine = environment()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sizes = (SMALL,) if options.quick else SIZES
    results: dict[str, Any] = {}
    for size in sizes:
        if size.torch_rounds:
            compare_first(size)
        results[str(size)] = measure(size, options.rounds)
    header = ["schedule", "actions", "build M/s", "check M/s", "simulate M/s", "all M/s"]
    header += ["torch builds / build", "torch builds, spaces / all"]
    parts = [table(header, [row(size, results[str(size)]) for size in sizes])]
    print(markdown(parts))
    if not options.quick:
        results["own process"] = fresh = {str(size): in_own_process(size) for size in LARGE}
        header = ["in a process of its own", "actions", "seconds", "bytes an action", "command, CPU seconds"]
        parts.append(table(header, [_fresh_row(name, numbers) for name, numbers in fresh.items()]))
        print(f"\n{parts[-1]}")
    save(options.output, {"rounds": options.rounds}, machine, results, parts)


if __name__ == "__main__":
    main()
