"""``pipeloom doctor --measure``: measure this machine and save it as a cluster."""

import time
from pathlib import Path

from pipeloom.common.atomic_file import write_named
from pipeloom.common.quantities import bytes_text, counted, seconds_text
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.local.saved import local_path, notices


def measure_and_save(out: str | None, *, as_json: bool) -> int:
    """Measure, save to `out` or to the file of cluster ``local``, and print; returns the exit code."""
    from pipeloom.train.machine.measure import measure_machine

    path = Path(out) if out is not None else local_path()
    if path.suffix != ".json":
        raise InputError(f"--out={out}: must end in .json, as the cluster files that --cluster takes.")
    try:  # before a measurement that takes a minute
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path}: {error.strerror or error}. Use a writable path.") from error
    start = time.perf_counter()
    cluster = measure_machine()
    write_named("--out", str(path), cluster.to_json() + "\n")
    if as_json:
        print(cluster.to_json())
        return 0
    print("\n".join(_lines(cluster)))
    print(f"saved in {path} ({seconds_text(time.perf_counter() - start)}), for --cluster {_name(out)}")
    return 0


def _name(out: str | None) -> str:
    return "local" if out is None else out


def _lines(cluster: Cluster) -> list[str]:
    """What was found, a line for each number of processes."""
    measured = cluster.measured
    assert measured is not None
    lines = notices(cluster)[:1]
    for rates in measured.rates:
        words = []
        for kind, rows in rates.products.items():
            best = max(2 * a * b * c / seconds for a, b, c, seconds in rows)
            words.append(f"{kind} products up to {best / 1e9:.3g} GFLOP/s")
        if "elementwise" in rates.curves:
            fast = max(size / seconds for size, seconds in rates.curves["elementwise"])
            size, seconds = rates.curves["elementwise"][-1]
            words.append(f"elementwise {bytes_text(fast)}/s, {bytes_text(size / seconds)}/s of large tensors")
        if "kernel" in rates.seconds:
            words.append(f"{seconds_text(rates.seconds['kernel'])} per kernel")
        if "message" in rates.curves:
            (_, latency), (size, seconds) = rates.curves["message"][0], rates.curves["message"][-1]
            words.append(f"messages {seconds_text(latency)} and {bytes_text(size / seconds)}/s")
        if "all_reduce" in rates.curves:
            size, seconds = rates.curves["all_reduce"][-1]
            words.append(f"all-reduce of {bytes_text(size)} {seconds_text(seconds)}")
        if "crowding" in rates.seconds:
            words.append(f"processes in turn on a core {rates.seconds['crowding'] - 1:.0%} slower")
        count = rates.processes
        who = f"{count} process{'es' if count > 1 else ''} of {counted(rates.threads, 'thread')}"
        lines.append(f"{who}: {', '.join(words)}")
    return lines
