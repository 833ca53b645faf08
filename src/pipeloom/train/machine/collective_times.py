"""`time_collectives`: drawn collectives between processes of this machine. No torch here."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.errors import RunError
from pipeloom.processes import launcher


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTimes:
    """What processes of this machine found.

    Attributes:
        processes: their number.
        latency_seconds: of a message of 4 bytes from every process to the next one.
        bytes_per_second: of large ones.
        seconds: by collective, of its algorithms by kind; "library" is torch.distributed's own one.
    """

    processes: int
    latency_seconds: float
    bytes_per_second: float
    seconds: Mapping[str, Mapping[str, float]]


def time_collectives(processes: int, num_bytes: int, names: Sequence[str]) -> CollectiveTimes:
    """Run both algorithms of some collectives between `processes` of this machine, over gloo.

    Args:
        processes: at least 2.
        num_bytes: of the full tensor.
        names: of `COLLECTIVES`.

    Raises:
        RunError: a process failed; its error was printed.
    """
    with tempfile.TemporaryDirectory(prefix="pipeloom-collectives-") as folder:
        path = Path(folder) / "times.json"
        words = ["-m", "pipeloom.train.machine.collective_process", str(path), f"{num_bytes:d}", ",".join(names)]
        if launcher.launch([f"process {rank} of {processes}" for rank in range(processes)], words):
            raise RunError("the measurement failed. Run `pipeloom doctor`, and see the error above.")
        found = json.loads(path.read_text(encoding="utf-8"))
    return CollectiveTimes(processes=processes, **found)
