"""Tensor parallelism: layers shared by processes, in every layout, beside torch's DTensor and beside one process."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.processes import Crew
from benchmarks.common.reference import judge, write_reference
from benchmarks.common.report import Parts, Table, environment, markdown, save, table
from benchmarks.common.statistics import Spread, ratio, spread
from benchmarks.tensor_parallel import collectives
from benchmarks.tensor_parallel.parts import PARTS, Part
from benchmarks.tensor_parallel.subject import Built, Subject

MIB = 2**20
LINKS = (1e8, 1e9)  # bytes per second and device
COLLECTIVES = "collectives"


@contextmanager
def started(part: Part, names: Sequence[str]) -> Iterator[dict[str, Crew]]:
    """The crew of each system."""
    with ExitStack() as stack:
        crews: dict[str, Crew] = {}
        for name in names:
            entry = part.entries[name]
            key = entry.crew or name
            if key not in crews:
                crew = Crew(key, entry.processes, Subject, num_threads=entry.threads, process_group=entry.processes > 1)
                crews[key] = stack.enter_context(crew)
        yield {name: crews[part.entries[name].crew or name] for name in names}


def measure(part: Part, crews: dict[str, Crew], sizes: Any, rounds: int, steps: int) -> dict[str, Any]:
    """Rounds of all systems in turn; the time of a system in a round is the median of its steps there."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as scratch:
        reference = Path(scratch) / "reference.safetensors"
        write_reference(sizes, reference)
        for name, crew in crews.items():
            answers: list[Built] = crew.call("build", name, part.entries[name], sizes, str(reference))
            sent = max((answer.sent_bytes for answer in answers), key=lambda sent: sum(sent.values()))
            results[name] = {
                "error": judge(name, [answer.errors for answer in answers], sizes),
                "kept_bytes": [answer.kept_bytes for answer in answers],
                "sent_bytes": sent,
                "calls": answers[0].calls,
                **{what: [] for what in ("seconds", "cpu", "busiest", "waited")},
            }
        for _ in range(rounds):
            for name, crew in crews.items():
                _one_turn(name, crew, part.entries[name].kind == "dtensor", steps, results[name])
        for crew in set(crews.values()):
            crew.call("forget")
    for result in results.values():
        sent_bytes = sum(result["sent_bytes"].values())
        for link in LINKS if part.emulates else ():
            result[f"emulated {link:g}"] = [cpu + sent_bytes / link for cpu in result["busiest"]]
    return results


def _one_turn(name: str, crew: Crew, profiled: bool, steps: int, result: dict[str, Any]) -> None:
    # One step first, untimed: its caches were used by the others since its last turn.
    taken = list(zip(*crew.call("run_steps", name, 1 + steps), strict=True))[1:]
    result["seconds"].append(spread([max(s.end for s in step) - min(s.start for s in step) for step in taken]).median)
    result["cpu"].append(spread([sum(s.cpu for s in step) for step in taken]).median)
    result["busiest"].append(spread([max(s.cpu for s in step) for step in taken]).median)
    if profiled:
        result["waited"].append(max(crew.call("profiled", name)))
    else:
        result["waited"].append(spread([max(s.waited for s in step) for step in taken]).median)


def tables(name: str, results: dict[str, Any]) -> Parts:
    part = PARTS[name]
    parts: list[str | Table] = []
    for label, result in results.items():
        parts.append(f"### {name}: {label}")
        parts.append(_table_of_emulated(result) if part.emulates else _table_of_measured(result))
        rows = [
            (f"{a} / {b}", *(ratio(result[a][what], result[b][what]).show("{:.3f}") for what in part.compared))
            for a, b in part.comparisons
            if a in result and b in result
        ]
        parts.append(table(("ratio: median (quartiles)", *part.compared.values()), rows))
    return parts


def _table_of_measured(result: dict[str, Any]) -> Table:
    rows = [
        (
            *(system, spread(found["seconds"]).show("{:.1f}", 1e3)),
            spread(found["waited"]).show("{:.1f}", 1e3) if len(found["kept_bytes"]) > 1 else "",
            *(spread(found["cpu"]).show("{:.0f}", 1e3), found["calls"] or "", _sent(found)),
            *(f"{max(found['kept_bytes']) / MIB:.1f}", f"{found['error']:.0e}"),
        )
        for system, found in result.items()
    ]
    header = ("system", "ms per step", "ms in collectives", "CPU ms, all processes", "collectives", "MiB sent")
    return table((*header, "MiB kept", "largest error"), rows)


def _table_of_emulated(result: dict[str, Any]) -> Table:
    rows = [
        (
            *(system, spread(found["busiest"]).show("{:.0f}", 1e3)),
            *(spread(found[f"emulated {link:g}"]).show("{:.0f}", 1e3) for link in LINKS),
            *(found["calls"], _sent(found), f"{max(found['kept_bytes']) / MIB:.1f}", f"{found['error']:.0e}"),
        )
        for system, found in result.items()
    ]
    links = (f"ms per step, {link / 1e9:g} GB/s" for link in LINKS)
    header = ("layout", "CPU ms of the busiest device", *links, "collectives", "MiB sent")
    return table((*header, "MiB kept", "largest error"), rows)


def _sent(found: dict[str, Any]) -> str:
    return ", ".join(f"{axis} {size / MIB:.2f}" for axis, size in found["sent_bytes"].items() if size >= MIB / 200)


def headlines(name: str, results: dict[str, Any]) -> dict[str, Spread]:
    """Ratios for the README."""
    what = next(iter(PARTS[name].compared))
    return {
        f"{name}, {label}: {a} / {b}": ratio(result[a][what], result[b][what])
        for label, result in results.items()
        for a, b in PARTS[name].comparisons
        if a in result and b in result
    }


def run(name: str, arguments: argparse.Namespace) -> None:
    """Measure a part, print its tables and write its JSON file."""
    machine, results = environment(), {}
    parts: Parts
    if name == COLLECTIVES:
        results, ratios = collectives.measure(arguments.rounds), {}
        parts = collectives.tables(results)
        print(markdown(parts), flush=True)
    else:
        part = PARTS[name]
        with started(
            part, [system for system in part.entries if system in (arguments.systems or part.entries)]
        ) as crews:
            for label in [label for label in part.sizes if label in (arguments.sizes or part.sizes)]:
                results[label] = measure(part, crews, part.sizes[label], arguments.rounds, arguments.steps)
                print(markdown(tables(name, {label: results[label]})), flush=True)
        parts, ratios = tables(name, results), headlines(name, results)
    settings = {"rounds": arguments.rounds, "steps": arguments.steps}
    save(arguments.output / f"{name}.json", settings, machine, results, parts, ratios)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tensor_parallel", description=__doc__)
    parser.add_argument("part", nargs="?", choices=(*PARTS, COLLECTIVES, "all"), default="all", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a system in a round")
    parser.add_argument("--systems", nargs="+", help="names in the tables")
    parser.add_argument("--sizes", nargs="+", help="headings of the tables, without the part")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of PART.json")
    arguments = parser.parse_args()
    for name in (*PARTS, COLLECTIVES) if arguments.part == "all" else (arguments.part,):
        run(name, arguments)


if __name__ == "__main__":
    main()
