"""What a run leaves behind: processes, names in shared memory, temporary files. No torch."""

import os
import signal
import time
from collections.abc import Container
from contextlib import suppress
from pathlib import Path

from pipeloom.common.process_place import children, stat_fields

_SEGMENTS = Path("/dev/shm")


def descendants() -> set[int]:
    """The living processes that this one has started, directly or not, or has adopted."""
    found, open_ids = set[int](), [os.getpid()]
    while open_ids:
        for child in children(open_ids.pop()):
            if child not in found and not _has_ended(child):
                found.add(child)
                open_ids.append(child)
    return found


def _has_ended(process: int) -> bool:
    fields = stat_fields(process)
    return not fields or fields[0] in "ZX"


def reap(known: Container[int]) -> None:
    """Take the exit codes of ended children of this process that it has adopted: those that are not `known`."""
    for process in children():
        if process not in known and _has_ended(process):
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)


def end(processes: set[int]) -> None:
    """End processes with SIGKILL, and wait until they have ended."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    while not all(map(_has_ended, processes)):
        time.sleep(0.001)


def segments() -> set[str]:
    """This user's names in shared memory that no living process of this user maps."""
    try:
        names = {path.name for path in _SEGMENTS.iterdir() if path.stat().st_uid == os.getuid()}
    except OSError:
        return set()
    mapped = ""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            mapped += (process / "maps").read_text() if names else ""
    return {name for name in names if f"{_SEGMENTS}/{name}" not in mapped}


def files(directory: Path) -> set[str]:
    """Names in a directory; empty if it does not exist."""
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


def unfinished(output_dir: Path) -> set[str]:
    """Hidden directories of saves in an output directory."""
    return {name for name in files(output_dir) if name.startswith(".checkpoint-")}
