"""`ProcessPlace`: where a process runs, and what the kernel says of it; a run writes those of its ranks into a file."""

import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from pipeloom.common.atomic_file import write_whole

PROCESSES_NAME = "processes.json"  # in the output directory of a run


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a rank's process runs.

    Attributes:
        host: identity of its host.
        process: process number.
        started: when it started, in clock ticks of its host; tells it from a later process of the same number. Empty
            without ``/proc``.
        name: of the rank, such as ``rank 3``.
    """

    host: str
    process: int
    started: str
    name: str

    @classmethod
    def own(cls, name: str) -> Self:
        """The place of this process."""
        fields = stat_fields(os.getpid())
        return cls(_host(), os.getpid(), fields[19] if fields else "", name)

    @property
    def is_near(self) -> bool:
        """Whether the process runs on this host, in the same process namespace."""
        return self.host == _host()

    def state(self) -> str | None:
        """The kernel's letter for the state of the process, T where it is stopped; None: it has ended."""
        fields = stat_fields(self.process)
        return fields[0] if fields and fields[19] == self.started else None


def place_of(name: str, descriptor: int) -> dict[str, Any]:
    """Where this process is, and its black box of this descriptor, as JSON."""
    return {**asdict(ProcessPlace.own(name)), "box": descriptor}


def write_places(directory: Path, places: Sequence[dict[str, Any]]) -> None:
    """Write the places of all ranks, in their order."""
    write_whole(directory / PROCESSES_NAME, json.dumps(places) + "\n")


def stat_fields(process: int) -> list[str]:
    """The fields of ``/proc/PROCESS/stat`` from the state on; empty: there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def children(process: int | str = "self") -> list[int]:
    """The children of a process, also those that have ended and were not reaped."""
    found = []
    with suppress(OSError):
        for task in Path(f"/proc/{process}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _host() -> str:
    """The name of this host, with what tells it from others and its process namespaces apart."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
