"""Memory of a device that two processes map, and events that both record and wait for.

    sender                                          receiver
    wait(taken) │ copy into the memory │ filled ──▶ wait(filled) │ copy out of it │ taken

Waits and records are queued in streams. A wait covers the last record that was queued before it, in either process:
queue a record before the other process learns of it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeloom.devices.device import Device

_POLL_SECONDS = 1e-3


class SharedEvent(ABC):
    """A moment in a stream of one of two processes."""

    @abstractmethod
    def record(self) -> None:
        """The moment is the end of what the current stream holds now."""

    @abstractmethod
    def wait(self) -> None:
        """What the current stream does from now on comes after the last record, if there was one."""

    @abstractmethod
    def passed(self) -> bool:
        """Whether the device has reached the last record, or there was none."""


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of a device, with the events of what it holds.

    Attributes:
        content: its bytes, as mapped by this process.
        filled: recorded by the sender.
        taken: recorded by the receiver.
    """

    content: Tensor
    filled: SharedEvent
    taken: SharedEvent


class MemorySharing(ABC):
    """Makes and opens shared memory of one device in this process.

    Attributes:
        identity: of the device; equal in all processes that use it.
        reach: identities of the devices whose memory this process can map.
    """

    identity: str
    reach: Sequence[str]

    def __init__(self) -> None:
        self._retired: list[Callable[[], bool]] = []
        self._abandoned: list[object] = []

    @property
    @abstractmethod
    def device(self) -> Device:
        """The device."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this kind, not on the CPU."""

    @abstractmethod
    def make(self, num_bytes: int) -> tuple[SharedMemory, int, bytes]:
        """New memory of at least this size; its descriptor, which the caller closes; and the names of its events."""

    @abstractmethod
    def open(self, num_bytes: int, descriptor: int, names: bytes) -> SharedMemory:
        """Map what another process made. The descriptor may be closed afterwards."""

    @abstractmethod
    def check(self) -> None:
        """Make and drop a little shared memory.

        Raises:
            RunError: the driver refuses.
        """

    def retire(self, idle: Iterable[Callable[[], bool]]) -> None:
        """Keep shared memory and its events until the other process is done with them.

        Args:
            idle: methods of what holds the memory, which return True then.
        """
        self._retired = [is_idle for is_idle in (*self._retired, *idle) if not is_idle()]

    def abandon(self, holders: Iterable[object]) -> None:
        """Keep shared memory until this process ends: streams of the device may wait for a process that has ended."""
        self._abandoned += holders

    def finish(self, seconds: float) -> None:
        """Wait, at most this long, until what was retired is idle: memory and events end with this process."""
        deadline = time.monotonic() + seconds
        self.retire(())
        while self._retired and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            self.retire(())
