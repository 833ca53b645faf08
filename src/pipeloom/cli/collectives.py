"""`pipeloom collectives`: who sends what in a collective, step by step, and what it costs on a cluster."""

import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pipeloom.cli.common.parser import Parser
from pipeloom.common.cores import usable_cores
from pipeloom.common.quantities import Bytes, bytes_text, number_text, seconds_text, table_lines
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.collectives import (
    ALGORITHMS,
    COLLECTIVES,
    Algorithm,
    collective_seconds,
    equal_bytes,
    link_of,
    picture,
)
from pipeloom.plan.collectives.picture import LEGEND
from pipeloom.plan.collectives.sends import SUMMED
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.local.saved import notices
from pipeloom.train.machine.collective_times import CollectiveTimes, time_collectives

_EXAMPLES = """\
pipeloom collectives --cluster dgx-h100
pipeloom collectives all-reduce all-to-all --cluster dgx-a100-80 --devices 64 --bytes 1GiB
pipeloom collectives all-gather --algorithm tree --devices 6 --draw 6
pipeloom collectives --devices 2 --bytes 1MiB --draw 0 --measure
"""
_DEVICES = 4  # without a cluster
_DRAWN = 4
_MOST_DRAWN = 16
_MOST_DEVICES = 1_000_000
_PER_CORE = 4  # processes of a measurement
_PATTERNS = {"ring": "rings", "flow": "all to all", "pairs": "trees", "shift": "shifts by 1, 2, 4, ..."}


class _Row(NamedTuple):
    """One algorithm: seconds on the cluster, and on this machine by formula and as measured."""

    algorithm: Algorithm
    seconds: float | None
    expected: float | None
    measured: float | None


def main(argv: Sequence[str]) -> int:
    """Draw and compare algorithms; returns the exit code."""
    options = _parser().parse_args(list(argv))
    names = list(dict.fromkeys(options.names or COLLECTIVES))
    if wrong := next((name for name in names if name not in ALGORITHMS), None):
        raise InputError(f"argument {wrong!r}: must be one of {', '.join(COLLECTIVES)}.")
    cluster = None if options.cluster is None else find_cluster(options.cluster, "--cluster")
    devices, num_bytes = _devices(options, cluster), options.bytes
    if num_bytes < 1:
        raise InputError(f"--bytes {num_bytes}: must be at least 1.")
    drawn = _drawn(options.draw, devices)
    times = time_collectives(devices, num_bytes, names) if options.measure else None
    rows = [
        _row(each, cluster, devices, num_bytes, times)
        for name in names
        for each in ALGORITHMS[name]
        if options.algorithm in (None, each.kind)
    ]
    if options.json:
        print(json.dumps(_answer(rows, cluster, devices, num_bytes, drawn, times), allow_nan=False))
        return 0
    if drawn > 1:
        print(LEGEND)
        for row in rows:
            print("", *picture(row.algorithm, drawn), sep="\n")
        print()
    print("\n".join(_lines(rows, cluster, devices, num_bytes, times)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="pipeloom collectives",
        description="Draw collectives step by step (who sends what, along a ring and as a tree), and compare their "
        "costs on a cluster: seconds by formula for n bytes, p devices, and links with latency α and bandwidth 1/β.",
        examples=_EXAMPLES,
    )
    parser.add_argument("names", nargs="*", type=str, metavar="NAME", help=f"{', '.join(COLLECTIVES)} (default: all)")
    parser.add_argument("--cluster", type=str, metavar="NAME|FILE", help="cluster, such as dgx-h100: seconds")
    parser.add_argument("--devices", type=int, help=f"neighbouring devices (default: those of a node, or {_DEVICES})")
    parser.add_argument("--bytes", type=Bytes, default=Bytes.parse("16MiB"), help="size n of the full tensor")
    parser.add_argument("--algorithm", type=Literal["ring", "tree"], help="one of the two algorithms (default: both)")
    parser.add_argument("--draw", type=int, metavar="N", help=f"ranks in pictures (default: at most {_DRAWN}); 0: none")
    parser.add_argument("--measure", action="store_true", help="run them with processes of this machine")
    parser.add_argument("--json", action="store_true", help="output as one JSON object")
    return parser


def _devices(options: Any, cluster: Cluster | None) -> int:
    """The number of devices. Raises InputError for one that is out of range."""
    most, cores = _MOST_DEVICES, usable_cores()
    found: int = options.devices
    if options.measure:
        most = _PER_CORE * cores
        found = max(2, cores) if found is None else found
    elif found is None:
        found = _DEVICES if cluster is None else min(max(2, cluster.devices_per_node), most)
    if not 2 <= found <= most:
        where = f", for processes on {cores} cores" if options.measure else ""
        raise InputError(f"--devices {found}: must be from 2 to {most:,}{where}.")
    return found


def _drawn(given: int | None, devices: int) -> int:
    if given is not None and (given < 0 or given == 1 or given > _MOST_DRAWN):
        raise InputError(f"--draw {given}: must be 0, for no pictures, or from 2 to {_MOST_DRAWN} ranks.")
    return min(_DRAWN, devices) if given is None else given


def _row(
    algorithm: Algorithm, cluster: Cluster | None, devices: int, num_bytes: int, times: CollectiveTimes | None
) -> _Row:
    seconds = None if cluster is None else collective_seconds(algorithm, cluster, devices, num_bytes)
    if times is None:
        return _Row(algorithm, seconds, None, None)
    moved = float(algorithm.moved(devices)) * num_bytes
    expected = algorithm.num_steps(devices) * times.latency_seconds + moved / times.bytes_per_second
    return _Row(algorithm, seconds, expected, times.seconds[algorithm.collective][algorithm.kind])


def _answer(
    rows: Sequence[_Row],
    cluster: Cluster | None,
    devices: int,
    num_bytes: int,
    drawn: int,
    times: CollectiveTimes | None,
) -> dict[str, Any]:
    """The object of ``--json``."""
    answer: dict[str, Any] = {"cluster": cluster and cluster.name, "devices": devices, "bytes": int(num_bytes)}
    if times is not None:
        answer["machine"] = {
            "processes": times.processes,
            "latency_seconds": times.latency_seconds,
            "bytes_per_second": times.bytes_per_second,
            "library_seconds": {name: found["library"] for name, found in times.seconds.items()},
        }
    answer["drawn_ranks"], found = drawn, []
    for algorithm, seconds, expected, measured in rows:
        row: dict[str, Any] = {
            "collective": algorithm.collective,
            "algorithm": algorithm.kind,
            "name": algorithm.name,
            "formula": algorithm.formula,
            "source": algorithm.source,
            "steps": algorithm.num_steps(devices),
            "bytes_in_turn": float(algorithm.moved(devices)) * num_bytes,
            "seconds": seconds,
        }
        if times is not None:
            row |= {"machine_seconds": expected, "measured_seconds": measured}
        if drawn:
            row["sends"] = [
                [{"from": s.source, "to": s.target, "chunks": s.chunks, "adds": s.adds} for s in sorted(step)]
                for step in algorithm.steps(drawn)
            ]
        found.append(row)
    answer["collectives"] = found
    return answer


def _lines(
    rows: Sequence[_Row], cluster: Cluster | None, devices: int, num_bytes: int, times: CollectiveTimes | None
) -> list[str]:
    """The table, and what its columns mean."""
    size = bytes_text(num_bytes)
    head = ["collective", "algorithm", "seconds by formula", "source", "steps", "bytes in turn"]
    head += [cluster.name] if cluster else []
    head += ["this machine", "measured", "gloo's own"] if times else []
    table = [head]
    for row in rows:
        each = row.algorithm
        cells = [each.collective, f"{each.kind}: {each.name}", each.formula, each.source]
        cells += [f"{each.num_steps(devices):,}", bytes_text(float(each.moved(devices)) * num_bytes)]
        if row.seconds is not None:
            cells.append(seconds_text(row.seconds))
        if times is not None and row.expected is not None and row.measured is not None:
            own = times.seconds[each.collective]["library"]
            cells += [seconds_text(row.expected), seconds_text(row.measured), seconds_text(own)]
        table.append(cells)
    lines = table_lines(table, left=(0, 1, 2, 3))
    lines.append(
        f"p = {devices:,} devices, n = {size}, L = log2 p rounded up; bytes in turn: of messages one after the other"
    )
    if cluster is not None:
        lines += [*notices(cluster), *_links(rows, cluster, devices), *_crossings(rows, cluster, devices)]
    if times is not None:
        rate = bytes_text(times.bytes_per_second)
        lines.append(
            f"this machine: {times.processes} processes over gloo, α {seconds_text(times.latency_seconds)}, 1/β "
            f"{rate}/s of messages from every process to the next one"
        )
    return lines


def _links(rows: Sequence[_Row], cluster: Cluster, devices: int) -> list[str]:
    """Latency α and bandwidth 1/β of each pattern of messages."""
    latencies, rates = dict[str, set[float]](), dict[str, set[float]]()
    for row in rows:
        for each in row.algorithm.rounds(devices):
            link = link_of(each, cluster, devices, sums=row.algorithm.collective in SUMMED)
            latencies.setdefault(each.pattern, set()).add(link.latency_seconds)
            rates.setdefault(each.pattern, set()).add(link.bytes_per_second or math.inf)
    found = []
    for pattern, words in _PATTERNS.items():
        if pattern in rates:
            latency, rate = sorted(latencies[pattern]), sorted(rates[pattern])
            ends = " to ".join(dict.fromkeys(seconds_text(each) for each in (latency[0], latency[-1])))
            across = " to ".join(dict.fromkeys(number_text(each / 1e9) for each in (rate[0], rate[-1])))
            found.append(f"{words} {ends}, {across} GB/s")
    return [f"{cluster.name}: α, 1/β: {'; '.join(found)}"]


def _crossings(rows: Sequence[_Row], cluster: Cluster, devices: int) -> list[str]:
    """A line with the message sizes for which trees are faster than rings."""
    found = []
    for name in dict.fromkeys(row.algorithm.collective for row in rows):
        most = equal_bytes(name, cluster, devices)
        found.append(f"{name} {'any size' if most is None else f'below {bytes_text(most)}' if most else 'never'}")
    return [f"{cluster.name}: trees are faster: {', '.join(found)}"]
