"""Parents and orphans, as the Linux kernel treats them. No torch."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def end_with_parent() -> None:
    """From now on this process is killed when its parent process ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_with(parent: int) -> None:
    """`end_with_parent`; this process ends now if its parent is no longer the one that started it."""
    end_with_parent()
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


@contextmanager
def adopting() -> Iterator[None]:
    """Inside, descendants whose parents have ended become children of this process."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
