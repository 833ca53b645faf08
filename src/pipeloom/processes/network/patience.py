"""What a process waits for while others start: a line after a while, and then ever more rarely."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

FIRST_SECONDS = 30.0  # until the first line; each line doubles the time that was waited
_PROBE_SECONDS = 3.0


@contextmanager
def telling(what: Callable[[], str], first_seconds: float = FIRST_SECONDS) -> Iterator[None]:
    """Print ``what`` this process waits for, with how long, while the block takes time."""
    over = threading.Event()

    def tell() -> None:
        waited = first_seconds
        while not over.wait(waited if waited == first_seconds else waited / 2):
            with suppress(OSError):
                os.write(2, f"pipeloom: after {waited:g} s {what()}\n".encode())
            waited *= 2

    thread = threading.Thread(target=tell, name="pipeloom-patience", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def state_of(host: str, port: int) -> str:
    """What this process finds at a port of a host, in words."""
    try:
        with socket.create_connection((host, port), _PROBE_SECONDS):
            return "it answers, but not all other ranks have come"
    except socket.gaierror:
        return f"{socket.gethostname()} does not know this name"
    except ConnectionRefusedError:
        return "no process listens there; rank 0 has not started, or has ended"
    except TimeoutError:
        return "nothing comes back; the host is down, or a firewall or the network is in between"
    except OSError as error:
        return f"{error.strerror or error}"
