"""`SharedBlock`: memory for the tensors of one message, mapped by its sender and its receiver.

    byte 0        whether the receiver still uses the block; set by the sender, cleared by the receiver
    byte 64...    the tensors of one message, each aligned to 64 bytes

The C library makes the mapping: Python's ``mmap`` keeps a file descriptor open for each, and a step of a thousand
micro-batches would run out of descriptors.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from pipeloom.processes.host_memory import telling_of_memory
from pipeloom.transport.values import Layout

HEAD_BYTES = 64
_FREE, _USED = 0, 1
_COPIED_BYTES = 1 << 17  # a receiver copies messages up to this size
_MOST_LAYOUTS = 64  # of which a block keeps views
_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def mapped(descriptor: int, num_bytes: int, flags: int = mmap.MAP_SHARED) -> Any:
    """A memory file as a buffer, unmapped with its last view. The descriptor may be closed afterwards."""
    address = _C.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        with telling_of_memory("a mapping of shared memory", num_bytes):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(memory, _C.munmap, address, num_bytes).atexit = False
    return memory


class SharedBlock:
    """A block with room for `capacity` bytes of tensors. Its number identifies it on both sides of a channel.

    The descriptor of its memory may be closed afterwards.
    """

    device_capacity = 0  # that of a DeviceBlock is not

    __slots__ = ("_bytes", "_lease", "_memory", "_places", "capacity", "number")

    def __init__(self, number: int, descriptor: int, capacity: int) -> None:
        self.number = number
        self.capacity = capacity
        self._memory = mapped(descriptor, HEAD_BYTES + capacity)
        with torch.inference_mode(False):  # a later message may be written outside of inference mode
            self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._places: dict[int, tuple[Layout, list[Tensor]]] = {}  # by the id of the layout
        self._lease: weakref.ref[memoryview] | None = None

    @property
    def free(self) -> bool:
        """Whether the sender may write to it."""
        return bool(self._memory[0] == _FREE)

    def is_idle(self) -> bool:
        """Whether neither process uses it."""
        return self.free

    def write(self, layout: Layout, tensors: Any, tail: bytes = b"") -> None:
        """Sender: copy a message's tensors, and `tail` to the end of the block, and mark it used."""
        self._memory[0] = _USED
        if tail:
            memoryview(self._memory).cast("B")[-len(tail) :] = tail
        places = self.places(layout)
        if len(places) == 1:
            places[0].copy_(tensors[0])
        elif places:
            torch._foreach_copy_(places, tensors)

    def places(self, layout: Layout) -> list[Tensor]:
        """Views of a message's tensors in the block; cached, since most messages of a block have few layouts."""
        known = self._places.get(id(layout))
        if known is not None:
            return known[1]
        places = []
        for (shape, dtype, _), offset in zip(layout.specs, layout.offsets, strict=True):
            start = HEAD_BYTES + offset
            flat = self._bytes[start : start + shape.numel() * dtype.itemsize]
            with torch.inference_mode(False):
                places.append(flat.view(dtype).view(shape))
        if len(self._places) >= _MOST_LAYOUTS:
            self._places.clear()
        self._places[id(layout)] = layout, places
        return places

    def tail(self, num_bytes: int) -> bytes:
        """Receiver: the last bytes of the block."""
        return bytes(memoryview(self._memory).cast("B")[-num_bytes:])

    def copies(self, layout: Layout) -> list[Tensor]:
        """Receiver: copies of the message's tensors; the block stays used."""
        return [place.clone() for place in self.places(layout)]

    def release(self) -> None:
        """Receiver: the sender may write to the block again."""
        self._memory[0] = _FREE

    def read(self, layout: Layout) -> list[Tensor]:
        """Receiver: the message's tensors, as views; the block is free again when the last view is gone.

        Tensors of a small message are copies: copying takes less time, and the block is free at once.
        """
        if layout.num_bytes <= _COPIED_BYTES:
            copies = [place.clone() for place in self.places(layout)]
            self._memory[0] = _FREE
            return copies
        view = memoryview(self._memory)  # only the storages below keep it alive

        def release(_: Any, memory: Any = self._memory) -> None:
            memory[0] = _FREE

        self._lease = weakref.ref(view, release)
        tensors = []
        for (shape, dtype, _), offset in zip(layout.specs, layout.offsets, strict=True):
            count = shape.numel()
            if count:
                flat = torch.frombuffer(view, dtype=dtype, count=count, offset=HEAD_BYTES + offset)
                tensors.append(flat.view(shape))
            else:
                tensors.append(torch.empty(shape, dtype=dtype))
        return tensors
