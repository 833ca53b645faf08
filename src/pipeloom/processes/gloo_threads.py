"""The end of a process that used gloo: nothing of it may be at work when the interpreter shuts down."""

from __future__ import annotations

import atexit
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOOK_SECONDS = 0.05  # between two looks at the threads
_MOST_SECONDS = 5.0  # threads of the user's may be at work for ever


@cache
def let_gloo_finish() -> None:
    """Before the interpreter shuts down, let gloo's threads have it once more. Who uses gloo calls it beforehand.

    They let go of tensors a moment after a collective has returned, and need the interpreter for that. One that asks
    for it during the shutdown is ended inside C++ code, which aborts a process whose work is done.
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Until all other threads sleep, seen twice: one that waits for the interpreter sleeps too, but has it in between.

    On a busy machine a thread that has something to do may wait long for a core.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        num_quiet = 0 if _others_work() else num_quiet + 1


def _others_work() -> bool:
    """Whether another thread of this process has something to do; no where the system does not say."""
    own = str(threading.get_native_id())
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # it ended just now
                if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
