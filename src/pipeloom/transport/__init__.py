"""Messages between ranks: one interface, and transports for one process, one host and several hosts.

interface           `Transport`, `Channel` and the two ends of a channel; numbers of calls
values              tensors and nested containers as messages; batches cut into micro-batches
connect             chooses the transport of a run and connects its ranks; `HybridTransport` combines two transports
loopback            all ranks in one process
shared_memory       ranks that are processes of one host; its parts are shared_channel and shared_block
torch_distributed   ranks that torch.distributed connects, over gloo or NCCL
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.transport.connect import HybridTransport
    from pipeloom.transport.interface import Channel, Incoming, Lane, Message, OneProcessTransport, Outgoing, Transport
    from pipeloom.transport.loopback import LoopbackTransport
    from pipeloom.transport.shared_memory import SharedMemoryTransport
    from pipeloom.transport.torch_distributed import TorchDistributedTransport
    from pipeloom.transport.values import Layout

# Public names, and the module that each lives in.
_HOMES = {
    "Channel": "pipeloom.transport.interface",
    "HybridTransport": "pipeloom.transport.connect",
    "Incoming": "pipeloom.transport.interface",
    "Lane": "pipeloom.transport.interface",
    "Layout": "pipeloom.transport.values",
    "LoopbackTransport": "pipeloom.transport.loopback",
    "Message": "pipeloom.transport.interface",
    "OneProcessTransport": "pipeloom.transport.interface",
    "Outgoing": "pipeloom.transport.interface",
    "SharedMemoryTransport": "pipeloom.transport.shared_memory",
    "TorchDistributedTransport": "pipeloom.transport.torch_distributed",
    "Transport": "pipeloom.transport.interface",
}

__all__ = [
    "Channel",
    "HybridTransport",
    "Incoming",
    "Lane",
    "Layout",
    "LoopbackTransport",
    "Message",
    "OneProcessTransport",
    "Outgoing",
    "SharedMemoryTransport",
    "TorchDistributedTransport",
    "Transport",
]

__getattr__ = lazy_exports(__name__, _HOMES)
