"""A device of the CPU that does nothing before it has to, and memory of it that two ends share.

Copies on the device are queued in its streams. A stream runs when something waits for it, and then only as far as it
has to: where a wait is missing, a copy reads what is not there yet, or overwrites what is still to be read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeloom.devices import HostDevice
from pipeloom.devices.sharing import MemorySharing, SharedEvent, SharedMemory


class Moment(NamedTuple):
    """The place behind the first `length` operations of a stream."""

    queue: list[Callable[[], object]]
    length: int

    def reach(self) -> None:
        for index in range(self.length):
            operation, self.queue[index] = self.queue[index], lambda: None
            operation()

    @property
    def passed(self) -> bool:
        return all(operation.__name__ == "<lambda>" for operation in self.queue[: self.length])


class _Queued(TorchDispatchMode):
    def __init__(self, queue: list[Callable[[], object]]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default:
            target, source = args[:2]
        elif function is torch.ops.aten.clone.default:
            source, target = args[0], torch.full_like(args[0], -1)
        else:
            return function(*args, **(kwargs or {}))

        def copy() -> None:
            target.copy_(source)

        self._queue.append(copy)
        return target


class LazyDevice(HostDevice):
    """See the module.

    Attributes:
        used: (stream, data pointer) of `used_here`.
    """

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, list[Callable[[], object]]] = {}
        self._current = "compute"
        self.used: list[tuple[str, int]] = []

    @property
    def queue(self) -> list[Callable[[], object]]:
        return self._queues.setdefault(self._current, [])

    def mark(self) -> Moment:
        return Moment(self.queue, len(self.queue))

    def wait(self, mark: Moment | None) -> None:
        if mark is not None:

            def wait() -> None:
                mark.reach()

            self.queue.append(wait)

    def used_here(self, tensor: Tensor) -> None:
        self.used.append((self._current, tensor.data_ptr()))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            with _Queued(self.queue):
                yield
        finally:
            self._current = before

    def synchronize(self) -> None:
        for queue in self._queues.values():
            Moment(queue, len(queue)).reach()


class _Event(SharedEvent):
    def __init__(self, device: LazyDevice, records: list[Moment]) -> None:
        self._device, self._records = device, records

    def record(self) -> None:
        self._records.append(self._device.mark())

    def wait(self) -> None:
        self._device.wait(self._records[-1] if self._records else None)

    def passed(self) -> bool:
        return not self._records or self._records[-1].passed


class LazySharing(MemorySharing):
    """Both ends are in this process. Tensors of float64 count as tensors on the device."""

    identity, reach = "lazy", ("lazy",)
    events: dict[bytes, list[Moment]] = {}  # noqa: RUF012  # of both ends

    def __init__(self) -> None:
        super().__init__()
        self._device = LazyDevice()

    @property
    def device(self) -> LazyDevice:
        return self._device

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64

    def check(self) -> None:
        """Memory can always be made."""

    def make(self, num_bytes: int) -> tuple[SharedMemory, int, bytes]:
        descriptor = os.memfd_create("lazy")
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(descriptor, size)
        names = os.urandom(16)
        return self.open(size, descriptor, names), descriptor, names

    def open(self, num_bytes: int, descriptor: int, names: bytes) -> SharedMemory:
        content = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        filled, taken = (_Event(self._device, self.events.setdefault(names + kind, [])) for kind in (b"f", b"t"))
        return SharedMemory(content, filled, taken)


class FlaggedSharing(MemorySharing):
    """Of processes: events are counts in the memory itself; a wait for a record that is not there yet fails."""

    identity, reach = "flagged", ("flagged",)

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0

    @property
    def device(self) -> HostDevice:
        return HostDevice()

    def holds(self, tensor: Tensor) -> bool:
        return tensor.dtype == torch.float64

    def check(self) -> None:
        """Memory can always be made."""

    def make(self, num_bytes: int) -> tuple[SharedMemory, int, bytes]:
        self.num_made += 1
        descriptor = os.memfd_create("flagged")
        os.ftruncate(descriptor, num_bytes + 2 * 8)
        return self._map(num_bytes, descriptor, made=True), descriptor, b"two names"

    def open(self, num_bytes: int, descriptor: int, names: bytes) -> SharedMemory:
        assert names == b"two names"
        return self._map(num_bytes, descriptor, made=False)

    def _map(self, num_bytes: int, descriptor: int, *, made: bool) -> SharedMemory:
        content = torch.frombuffer(mmap.mmap(descriptor, num_bytes + 16), dtype=torch.uint8)
        counts = content[num_bytes:].view(torch.int64)
        one, other = counts[:1], counts[1:]
        return SharedMemory(content[:num_bytes], _Count(one, other, made), _Count(other, one, made))


class _Count(SharedEvent):
    def __init__(self, own: Tensor, other: Tensor, made: bool) -> None:
        self._own, self._other, self._made = own, other, made

    def record(self) -> None:
        self._own += 1

    def wait(self) -> None:
        # The sender waits until all that was filled is taken, the receiver for one more than it has taken.
        assert int(self._own) == int(self._other) + (0 if self._made else 1)

    def passed(self) -> bool:
        return True
