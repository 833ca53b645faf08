"""Which network interface leads to the other hosts of a run: gloo listens and connects there.

gloo itself takes the address of the host's name. On many machines this is 127.0.1.1, which other hosts cannot reach.
"""

import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

VARIABLE = "GLOO_SOCKET_IFNAME"
_CHOSEN = "_PIPELOOM_INTERFACE"  # variable: the interface that a process chose by itself
LOOPBACK = "lo"
_SIOCGIFCONF = 0x8912
_ROW = struct.Struct("16s4x4s16x")  # name and IPv4 address of an interface
_MOST_ROWS = 1024
_ANY_PORT = 9  # a route does not depend on it, and nothing is sent


class Route(NamedTuple):
    """A way to another host: its address, and the name of this host's interface."""

    address: str
    interface: str


def route_to(host: str) -> Route | None:
    """The route to a host by its name or IPv4 address; None where there is none, or Linux does not tell it."""
    with suppress(OSError, ValueError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, _ANY_PORT))
        address, own = probe.getpeername()[0], probe.getsockname()[0]
        if own.startswith("127."):
            return Route(address, LOOPBACK)
        if (name := _interfaces(probe).get(own)) is not None:
            return Route(address, name)
    return None


def choose_interface(store: Store, rank: int, size: int, local_size: int, host: str) -> str | None:
    """The interface for gloo, which leads to `host`, where the ranks met; None: gloo's own choice.

    Every rank of the run calls it. Processes on `host` itself may know it by a loopback address: they take the address
    by which other hosts reach it.

    Args:
        store: of the run.
        rank, size: of this process, and number of processes.
        local_size: number of processes on this host; `size`: all are on one host.
        host: name or address.
    """
    alone = local_size >= size
    route = None if alone else route_to(host)
    away = "" if route is None or route.interface == LOOPBACK else route.address
    store.set(f"pipeloom/address/{rank}", away)  # in any case: a rank may not know that all are on one host
    if alone:
        return LOOPBACK
    if route is None or away:
        return None if route is None else route.interface
    for other in range(size):
        if other != rank and (address := store.get(f"pipeloom/address/{other}").decode()):
            found = route_to(address)
            return None if found is None else found.interface
    return LOOPBACK


def set_interface(store: Store, rank: int, size: int, local_size: int, host: str) -> None:
    """Set the variable that names gloo's interface, unless the user has set it; every rank calls it.

    Ranks may meet again on other hosts: what an earlier call has chosen does not count.
    """
    name = choose_interface(store, rank, size, local_size, host)
    if os.environ.get(VARIABLE) != os.environ.get(_CHOSEN):
        return
    for variable in (VARIABLE, _CHOSEN):
        os.environ.pop(variable, None)
        if name is not None:
            os.environ[variable] = name


def _interfaces(ask: socket.socket) -> Mapping[str, str]:
    """The names of this host's interfaces that are up, by IPv4 address."""
    rows = ctypes.create_string_buffer(_ROW.size * _MOST_ROWS)
    answer = fcntl.ioctl(ask, _SIOCGIFCONF, struct.pack("iP", len(rows), ctypes.addressof(rows)))
    num_bytes, _ = struct.unpack("iP", answer)
    found = _ROW.iter_unpack(rows.raw[:num_bytes])
    return {socket.inet_ntoa(ip): name.split(b"\0")[0].decode().partition(":")[0] for name, ip in found}
