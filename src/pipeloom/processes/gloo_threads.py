"""Gloo's threads: they must end before the interpreter shuts down."""

import atexit
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_LOOK_SECONDS = 0.05  # between two checks of the threads
_MOST_SECONDS = 5.0  # the user's threads may never be idle


@cache
def let_gloo_finish() -> None:
    """Register a wait for gloo's threads before the interpreter shuts down. Call it before using gloo.

    Gloo's threads release tensors shortly after a collective has returned, and need the interpreter lock for that. A
    thread that requests the lock during the shutdown is ended inside C++ code, which aborts the process.
    """
    atexit.register(_wait_for_threads)


def _wait_for_threads() -> None:
    """Wait until all other threads sleep in two checks. A thread that waits for the interpreter lock sleeps too, but
    runs between the checks. On a busy host a runnable thread may wait long for a core.
    """
    deadline = time.monotonic() + _MOST_SECONDS
    num_quiet = 0
    while num_quiet < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        num_quiet = 0 if _others_work() else num_quiet + 1


def _others_work() -> bool:
    """Whether another thread of this process is runnable; False where /proc does not show threads."""
    own = str(threading.get_native_id())
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                if task.name != own and (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
