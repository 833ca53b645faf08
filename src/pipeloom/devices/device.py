"""`Device`: what the runtime asks of the device where a rank computes.

A device works through *streams*: queues of kernels and copies that end later than the calls which start them. The host
runs ahead and waits for a device only where it reads a value. What must come after other work is ordered by *marks*:

    rank a, compute    | F | ------ mark
    rank a, outgoing            wait | copy out | mark
    rank b, incoming                              wait | copy in | mark
    rank b, compute                                                wait | F |

    compute     forwards, backwards and the optimizer: the current stream of the thread that runs the rank
    second      forwards and backwards of every second stage of a rank, where pairs of them overlap
    outgoing    copies of messages to other ranks
    incoming    copies of messages from other ranks

Memory that one stream allocated and another reads is not used again before both are done with it (`used_here`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from pipeloom.devices.graphs import Graphs

Mark = Any  # a moment in a stream; None: it has passed
Stamp = Any  # a moment whose time can be asked for later


class Stream(StrEnum):
    """The streams of a rank beside its first one, where it computes."""

    SECOND = "second"
    OUTGOING = "outgoing"
    INCOMING = "incoming"


class Device(ABC):
    """Streams, marks and times of one device.

    Attributes:
        device: its name in torch.
        is_asynchronous: whether operations may end after their calls return.
    """

    device: torch.device
    is_asynchronous: bool

    # Order

    @abstractmethod
    def mark(self) -> Mark:
        """The end of what the current stream holds now."""

    @abstractmethod
    def wait(self, mark: Mark) -> None:
        """What the current stream does from now on comes after `mark`. The host does not wait."""

    @abstractmethod
    def used_here(self, tensor: Tensor) -> None:
        """The current stream uses a tensor that another stream allocated: its memory stays until both are done."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Inside the block, `stream` is the current stream."""

    @abstractmethod
    def is_in(self, stream: Stream) -> bool:
        """Whether the current stream is `stream`, of this thread or of another whose backward this one runs."""

    @abstractmethod
    def computing(self, after: Mark = None) -> AbstractContextManager[Any]:
        """Inside the block, this thread computes on this device, in a stream of its own that begins after `after`."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits until all streams of the device are done."""

    # Memory

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory of the device that no process has; 0 on the CPU."""

    # Values

    @abstractmethod
    def receive(self, tensor: Tensor, ready: Mark) -> Tensor:
        """A tensor of any device on this one, complete for what the current stream does from now on.

        Args:
            tensor: of this process.
            ready: the moment when it is complete.
        """

    @abstractmethod
    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of the host on this device, complete for what the current stream does from now on.

        The host may change its own as soon as this returns, also where their memory is pinned.
        """

    # Times

    @abstractmethod
    def stamp(self) -> Stamp:
        """The moment when the current stream has done what it holds now."""

    @abstractmethod
    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        """When the moments were (time.perf_counter, seconds); 0.0 for 0.0. Waits for the last of them."""

    # Graphs

    @abstractmethod
    def graphs(self) -> Graphs | None:
        """What records kernels to start them again with one call; None where a device cannot."""
