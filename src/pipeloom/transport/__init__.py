"""Messages between ranks: one interface, and transports for one process, one host and several hosts.

interface           `Transport`, `Channel` and its two ends; call_numbers: the number of the call in every message
values              tensors and nested containers as messages; batches cut into micro-batches
connect             chooses the transport of a run and connects its ranks
loopback            ranks that share one process
shared_memory       ranks that are processes of one host, on CPUs or CUDA devices; its channels are in shared_channel,
                    their memory in shared_block and device_block
device_places       the devices of all processes, and which transports connect them
torch_distributed   ranks that torch.distributed connects, over gloo or NCCL
hybrid              shared memory within a host and torch.distributed between hosts
"""

from pipeloom.transport.hybrid import HybridTransport
from pipeloom.transport.interface import Channel, Incoming, Lane, Message, OneProcessTransport, Outgoing, Transport
from pipeloom.transport.loopback import LoopbackTransport
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.torch_distributed import TorchDistributedTransport
from pipeloom.transport.values import Layout

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
