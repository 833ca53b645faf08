"""What holds for every test: one thread for torch, signals as they are by default, and no process left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

# Two cores run several tests and their ranks at once; must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Under nohup, or with `&` in a script, these are ignored from the start, and what a test starts inherits it.
for _number, _default in {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGTTOU: signal.SIG_DFL,
}.items():
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

_PROC = Path("/proc")
_MARK = f"_PIPELOOM_TEST={os.getpid()}"  # in the environment of everything that this process starts
os.environ["_PIPELOOM_TEST"] = str(os.getpid())


def _process_ids() -> set[int]:
    return {int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()} if _PROC.is_dir() else set()


def _left_behind(before: set[int]) -> dict[int, str]:
    """Processes that descend from this one, also orphaned ones, and were not there `before`: id -> command line."""
    found = {}
    for process in _process_ids() - before:
        with suppress(OSError):
            if _MARK.encode() not in (_PROC / str(process) / "environ").read_bytes().split(b"\0"):
                continue
            command = (_PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if command and "multiprocessing.resource_tracker" not in command:  # a zombie has no command line
                found[process] = command.strip()
    return found


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test that leaves processes behind, and end them."""
    before = _process_ids()
    yield
    left = _left_behind(before)
    for _ in range(100):  # what was told to end may take a moment
        if not left:
            return
        time.sleep(0.02)
        left = _left_behind(before)
    for process in left:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    assert not left, f"the test left processes behind: {left}"
