"""What a process waits for while others start, in lines that come ever more rarely; and how long it may wait."""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FIRST_SECONDS = 30.0  # until the first line; each line doubles the time that was waited
_PROBE_SECONDS = 3.0
_REFUSAL_GAP_SECONDS = 1.0  # between two tries


@contextmanager
def telling(
    what: Callable[[], str],
    first_seconds: float = FIRST_SECONDS,
    *,
    limit_seconds: float = math.inf,
    at_limit: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """Print ``what`` this process waits for, with how long, while the block takes time.

    Args:
        what: words behind ``after 30 s``.
        first_seconds: until the first line.
        limit_seconds: after which `at_limit` is called once, in a thread: the block may be in a call that blocks.
    """

    def tell(over: threading.Event) -> None:
        began, due = time.monotonic(), first_seconds
        while True:
            if over.wait(max(0.0, began + min(due, limit_seconds) - time.monotonic())):
                return
            if due >= limit_seconds:
                at_limit()
                return
            with suppress(OSError):
                os.write(2, f"pipeloom: after {due:g} s {what()}\n".encode())
            due *= 2

    with _beside("pipeloom-patience", tell):
        yield


@contextmanager
def noticing_refusals(host: str, port: int, seconds: float, at_end: Callable[[], object]) -> Iterator[None]:
    """During the block, `at_end` is called in a thread once connections to a port were refused for `seconds` on end.

    Only a refusal counts, which says that no process listens there; a time-out, a reset or an unknown name do not.
    """

    def look(over: threading.Event) -> None:
        refused = 0  # tries on end; the time in which this process was stopped does not count
        gap = min(_REFUSAL_GAP_SECONDS, seconds)
        while not over.wait(gap):
            refused = refused + 1 if _refuses(host, port) else 0
            if refused * gap >= seconds and not over.is_set():
                at_end()
                return

    with _beside("pipeloom-refusals", look):
        yield


@contextmanager
def _beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread during the block; its event is set at the end of the block."""
    over = threading.Event()
    threading.Thread(target=work, args=(over,), name=name, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _refuses(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), _PROBE_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def state_of(host: str, port: int) -> str:
    """What this process finds at a port of a host, in words."""
    try:
        with socket.create_connection((host, port), _PROBE_SECONDS):
            return "it answers, but not all other ranks have come, or its process is stopped"
    except socket.gaierror:
        return f"{socket.gethostname()} does not know this name"
    except ConnectionRefusedError:
        return "no process listens there; rank 0 has not started, or has ended"
    except TimeoutError:
        return "nothing comes back; the host is down, or a firewall or the network is in between"
    except OSError as error:
        return f"{error.strerror or error}"
