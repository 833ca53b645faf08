"""Messages between ranks: one interface, and a transport each for one process, one machine and several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing, Transport
    from pipeloom.transport.local_remote import LocalRemoteTransport
    from pipeloom.transport.loopback import LoopbackTransport
    from pipeloom.transport.values import Layout

# Public names, and the module that each lives in.
_HOMES = {
    "Channel": "pipeloom.transport.interface",
    "Incoming": "pipeloom.transport.interface",
    "Lane": "pipeloom.transport.interface",
    "Layout": "pipeloom.transport.values",
    "LoopbackTransport": "pipeloom.transport.loopback",
    "LocalRemoteTransport": "pipeloom.transport.local_remote",
    "Outgoing": "pipeloom.transport.interface",
    "Transport": "pipeloom.transport.interface",
}

__all__ = [
    "Channel",
    "Incoming",
    "Lane",
    "Layout",
    "LocalRemoteTransport",
    "LoopbackTransport",
    "Outgoing",
    "Transport",
]

__getattr__ = lazy_exports(__name__, _HOMES)
