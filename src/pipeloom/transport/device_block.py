"""`DeviceBlock`: a block with device memory, for messages with tensors on a device.

    SharedBlock     whether the receiver still uses the block; tensors on the CPU
    SharedMemory    tensors on the device

Neither process waits for the device: streams wait for events. The receiver tells the sender that the block is free when
its stream has been told to copy the tensors out; the sender's stream waits until it has.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeloom.devices import Device, Mark
from pipeloom.devices.device import Stream
from pipeloom.devices.sharing import SharedMemory
from pipeloom.transport.shared_block import SharedBlock
from pipeloom.transport.values import Layout, layout_of_some


class DeviceBlock:
    """A block with room for tensors on the CPU and on a device.

    Args:
        host: for tensors on the CPU.
        memory: for the others.
        device: of the memory.
    """

    __slots__ = ("_device", "_host", "_layout", "_memory", "_places", "capacity", "device_capacity", "number")

    def __init__(self, host: SharedBlock, memory: SharedMemory, device: Device) -> None:
        self._host, self._memory, self._device = host, memory, device
        self.number, self.capacity, self.device_capacity = host.number, host.capacity, memory.content.numel()
        self._layout: Layout | None = None
        self._places: list[Tensor] = []

    @property
    def free(self) -> bool:
        """Whether the sender may write to it."""
        return self._host.free

    def is_idle(self) -> bool:
        """Sender: whether the receiver has read the last message, and its device has copied it out."""
        return self._host.free and self.is_read()

    def is_read(self) -> bool:
        """Receiver: whether its device has copied out all messages that it has read."""
        return self._memory.taken.passed()

    def write(self, layout: Layout, tensors: Sequence[Tensor], placed: bytes, tail: bytes, complete: Mark) -> None:
        """Sender: have the outgoing stream copy a message's tensors, and mark the block used.

        Args:
            layout, tensors: of the message.
            placed: for each tensor, 1 where it is on the device, 0 on the CPU.
            tail: written to the end of the memory on the CPU.
            complete: the moment when the tensors are complete.
        """
        on_host, on_device = layout_of_some(layout, placed)
        self._host.write(on_host, _some(tensors, placed, 0), tail)
        with self._device.on(Stream.OUTGOING):
            self._device.wait(complete)
            self._memory.taken.wait()
            for place, tensor in zip(self._places_of(on_device), _some(tensors, placed, 1), strict=True):
                place.copy_(tensor.detach(), non_blocking=True)
                self._device.used_here(tensor)
            self._memory.filled.record()

    def tail(self, num_bytes: int) -> bytes:
        """Receiver: the last bytes of the memory on the CPU."""
        return self._host.tail(num_bytes)

    def read(self, layout: Layout, placed: bytes) -> list[Tensor]:
        """Receiver: copies of the message's tensors, for which the current stream waits. The block is free."""
        on_host, on_device = layout_of_some(layout, placed)
        arrived = iter(self._host.copies(on_host))
        with self._device.on(Stream.INCOMING):
            self._memory.filled.wait()
            copies = [place.clone() for place in self._places_of(on_device)]
            self._memory.taken.record()
            complete = self._device.mark()
        self._host.release()
        self._device.wait(complete)
        for copy in copies:
            self._device.used_here(copy)
        copied = iter(copies)
        return [next(copied if byte else arrived) for byte in placed]

    def _places_of(self, layout: Layout) -> list[Tensor]:
        """Views of a message's tensors in the device memory; cached, since most messages have the same layout."""
        if layout is not self._layout:
            self._layout = layout
            self._places = []
            for (shape, dtype, _), offset in zip(layout.specs, layout.offsets, strict=True):
                flat = self._memory.content[offset : offset + shape.numel() * dtype.itemsize]
                with torch.inference_mode(False):
                    self._places.append(flat.view(dtype).view(shape))
        return self._places


def _some(tensors: Sequence[Tensor], placed: bytes, side: int) -> list[Tensor]:
    return [tensor for tensor, byte in zip(tensors, placed, strict=True) if byte == side]
