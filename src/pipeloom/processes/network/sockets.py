"""The sockets of this process, and how soon the kernel gives up a connection over which nothing comes back.

By default the kernel sends for about 15 minutes to a host that does not answer, and never notices that a host is gone
to which this process has nothing to send.
"""

import math
import os
import socket
from contextlib import suppress
from pathlib import Path

_INTERNET = (socket.AF_INET, socket.AF_INET6)
_PROBES = 3  # within the limit, where nothing else is sent


def open_sockets() -> dict[str, int]:
    """The sockets of this process: the kernel's name of each, and a descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if (name := os.readlink(entry)).startswith("socket:"):
                found[name] = int(entry.name)
    return found


class ConnectionLimits:
    """Limits for the TCP connections of this process with other hosts, also with those that are opened later.

    A connection ends with an error where the other host has not confirmed for the limit's time what was sent to it, or
    that it is there, or where a stopped process has not taken for this time what is sent to it.
    """

    def __init__(self) -> None:
        self._limit_seconds = math.inf
        self._limited: set[str] = set()

    def apply(self, limit_seconds: float) -> None:
        """Give all connections this limit; infinite: leave the kernel's."""
        if limit_seconds == math.inf or not hasattr(socket, "TCP_USER_TIMEOUT"):
            return
        if limit_seconds != self._limit_seconds:
            self._limit_seconds = limit_seconds
            self._limited.clear()
        present = open_sockets()
        self._limited &= present.keys()
        for name in present.keys() - self._limited:
            with suppress(OSError), socket.socket(fileno=os.dup(present[name])) as end:
                if end.family in _INTERNET and end.type == socket.SOCK_STREAM:
                    if end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        self._limited.add(name)
                        continue
                    end.getpeername()  # else it is not connected yet
                    self._limit(end)
                self._limited.add(name)

    def _limit(self, end: socket.socket) -> None:
        probe_seconds = max(1, int(self._limit_seconds / (_PROBES + 1)))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probe_seconds)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probe_seconds)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self._limit_seconds))
