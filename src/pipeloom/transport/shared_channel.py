"""The two ends of a channel over shared memory (see `pipeloom.transport.shared_memory`).

    datagram   | head | numbers of dropped blocks | names of a new block's events | layout | where each tensor is |

A datagram about a new block carries descriptors of its memory: on the CPU, and on a device for a `DeviceBlock`.
"""

import errno
import math
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pipeloom.devices import Mark
from pipeloom.devices.sharing import MemorySharing
from pipeloom.errors import PeerLost
from pipeloom.processes.waits import waits_for
from pipeloom.transport.call_numbers import in_words, of_words
from pipeloom.transport.device_block import DeviceBlock
from pipeloom.transport.interface import Channel, Incoming, Message, Outgoing
from pipeloom.transport.shared_block import HEAD_BYTES, SharedBlock
from pipeloom.transport.shared_flat import memory_file
from pipeloom.transport.values import Layout, decode, layout_of_some

# Block number, its capacity on the CPU and on the device, length of a layout that is in the block and not here, number
# of dropped blocks, length of the names of events, number of tensors of which it is said where they are, call.
_DATAGRAM = struct.Struct("<IQQIIIIQH")
_MAX_DATAGRAM_BYTES = 1 << 16
_MAX_LAYOUT_BYTES = 1 << 14  # a longer one goes into the block
_MAX_DROPPED = 1 << 12  # blocks named in one datagram
_NO_BLOCK = 0xFFFFFFFF
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_NO_WAIT = int(socket.MSG_DONTWAIT)


class Waiting(Protocol):
    """The transport of a channel, as far as a waiting receive uses it."""

    spin_seconds: float
    timeout_seconds: float
    processes: Sequence[int]  # of each rank
    sharing: MemorySharing | None  # of device memory

    def flush(self) -> bool:
        """Try to send what did not fit into the sockets; returns whether nothing is left."""


class SharedOutgoing(Outgoing):
    """Copies messages into blocks; a send never waits."""

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        backlogged: set["SharedOutgoing"],
        sharing: MemorySharing | None = None,
    ) -> None:
        self._socket, self.channel, self._sharing = connection, channel, sharing
        self._blocks: list[SharedBlock | DeviceBlock] = []
        self._num_made = 0
        self._used_in_step: set[int] = set()
        self._dropped: list[int] = []
        # A datagram for which the socket had no room, with descriptors; and messages after it.
        self._unsent: tuple[bytes, Sequence[int]] | None = None
        self._backlog: deque[tuple[Layout, Sequence[Tensor], int, bytes, Mark]] = deque()
        self._backlogged = backlogged
        self._lost = False

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        placed, complete = b"", None
        if self._sharing is not None and any(map(self._sharing.holds, tensors)):
            placed = bytes(map(self._sharing.holds, tensors))
            complete = self._sharing.device.mark()
        if self._unsent is not None and not self.flush():
            self._backlog.append((layout, tensors, call, placed, complete))
        elif not self._put(layout, tensors, call, placed, complete):
            self._backlogged.add(self)

    @property
    def num_bytes(self) -> int:
        """Of the blocks, which are kept for later messages."""
        return sum(block.capacity for block in self._blocks)

    def send_file(self, descriptor: int) -> None:
        """Send a memory file in place of a message; `SharedIncoming.receive_file` takes it."""
        assert self._unsent is None, "messages before it have not been sent"
        self._unsent = _DATAGRAM.pack(_NO_BLOCK, 0, 0, 0, 0, 0, 0, *in_words(0)), [os.dup(descriptor)]
        if not self._push():
            self._backlogged.add(self)

    def _put(self, layout: Layout, tensors: Sequence[Tensor], call: int, placed: bytes, complete: Mark) -> bool:
        """Copy a message into a block and send its datagram, or keep that until the socket has room."""
        dropped: list[int] = []
        if self._dropped:
            dropped, self._dropped = self._dropped[:_MAX_DROPPED], self._dropped[_MAX_DROPPED:]
        text = layout.header + placed if placed else layout.header
        long = text if len(text) > _MAX_LAYOUT_BYTES else b""
        number, capacity, on_device, names = _NO_BLOCK, 0, 0, b""
        descriptors: Sequence[int] = ()
        if layout.num_bytes or long:
            need, need_on_device = layout.num_bytes + len(long), 0
            if placed:
                host_layout, device_layout = layout_of_some(layout, placed)
                need, need_on_device = host_layout.num_bytes + len(long), device_layout.num_bytes
            block = self._free_block(need, need_on_device)
            if block is None:
                block, descriptors, names = self._make(need, need_on_device)
            number, capacity, on_device = block.number, block.capacity, block.device_capacity
            if isinstance(block, SharedBlock):
                block.write(layout, tensors, long)
            else:
                block.write(layout, tensors, placed, long, complete)
            self._used_in_step.add(number)
        lengths = (len(long), len(dropped), len(names), len(placed))
        head = _DATAGRAM.pack(number, capacity, on_device, *lengths, *in_words(call))
        numbers = struct.pack(f"<{len(dropped)}I", *dropped) if dropped else b""
        self._unsent = (head + numbers + names + (b"" if long else text), descriptors)
        return self._push()

    def _free_block(self, need: int, need_on_device: int) -> SharedBlock | DeviceBlock | None:
        """A free block for a message, at most twice as large on the host: the next message may need a larger one.

        A message without tensors on a device leaves device memory to others.
        """
        most = 2 * max(need, mmap.PAGESIZE)
        for block in self._blocks:
            there = block.device_capacity
            fits = need <= block.capacity <= most and (there >= need_on_device if need_on_device else not there)
            if fits and block.free:
                return block
        return None

    def _make(self, need: int, need_on_device: int) -> tuple[SharedBlock | DeviceBlock, list[int], bytes]:
        """A new block, its descriptors, and the names of its events."""
        names, memory, descriptors = b"", None, list[int]()
        if need_on_device:
            assert self._sharing is not None
            memory, descriptor, names = self._sharing.make(need_on_device)
            descriptors.append(descriptor)
        capacity = -(-need // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptors.insert(0, memory_file(HEAD_BYTES + capacity, "messages in shared memory"))
        block: SharedBlock | DeviceBlock
        block = host = SharedBlock(self._num_made, descriptors[0], capacity)
        if memory is not None and self._sharing is not None:
            block = DeviceBlock(host, memory, self._sharing.device)
        self._num_made += 1
        self._blocks.append(block)
        return block, descriptors, names

    def _push(self) -> bool:
        """Send the waiting datagram; False if the socket is full."""
        assert self._unsent is not None
        datagram, descriptors = self._unsent
        try:
            if not descriptors:
                self._socket.send(datagram, _SEND_FLAGS)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))
                self._socket.sendmsg([datagram], [rights], _SEND_FLAGS)  # socket.send_fds forgets the flags
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors in flight: like a full socket
                return False
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            # The receiver has ended. `end_step` raises; ranks that wait for it notice by their own channels.
            self._lost = True
        self._unsent = None
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def flush(self) -> bool:
        """Send what did not fit before; returns whether nothing is left."""
        while self._unsent is None or self._push():
            if not self._backlog:
                return True
            if not self._put(*self._backlog.popleft()):
                return False
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def end_step(self) -> None:
        """Unmap blocks that this step did not need."""
        if self._lost:
            raise PeerLost(f"rank {self.channel.target} ended before it had taken what this rank sent")
        if len(self._blocks) > len(self._used_in_step):
            idle = [b for b in self._blocks if b.number not in self._used_in_step and b.is_idle()]
            self._dropped.extend(block.number for block in idle)
            self._blocks = [block for block in self._blocks if block not in idle]
        self._used_in_step.clear()

    def discard(self) -> None:
        """Drop everything that was not sent."""
        for descriptor in self._unsent[1] if self._unsent is not None else ():
            os.close(descriptor)
        self._unsent = None
        self._backlog.clear()
        self._backlogged.discard(self)
        if self._sharing is not None:
            blocks = [block for block in self._blocks if isinstance(block, DeviceBlock)]
            gone = self._lost or self._has_hung_up()
            self._sharing.retire(block.is_idle for block in blocks if block.free or not gone)
            self._sharing.abandon(block for block in blocks if not block.free and gone)
        self._blocks.clear()

    def _has_hung_up(self) -> bool:
        """Whether the receiver has closed its end."""
        poll = select.poll()
        poll.register(self._socket, select.POLLHUP)
        return bool(poll.poll(0))


class SharedIncoming(Incoming):
    """Makes tensors of the blocks that datagrams name; its socket blocks."""

    def __init__(self, connection: socket.socket, channel: Channel, transport: Waiting) -> None:
        self._socket, self._channel, self._transport = connection, channel, transport
        self._blocks: dict[int, SharedBlock | DeviceBlock] = {}
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._longest_ms = 0

    @property
    def source_process(self) -> int:
        """The rank in the default group of the process that sends."""
        return self._transport.processes[self._channel.source]

    def ready(self) -> bool:
        return bool(self._poll.poll(0))

    def receive(self) -> Message:
        layout, block, placed, call = self._next_message()
        if isinstance(block, DeviceBlock):
            return Message(layout, block.read(layout, placed), call)
        if block is not None and not placed:
            return Message(layout, block.read(layout), call)
        tensors = self._empty(layout, placed)  # those on the device are
        if block is not None:
            tensors = [one if byte else two for one, two, byte in zip(tensors, block.read(layout), placed, strict=True)]
        return Message(layout, tensors, call)

    @contextmanager
    def lent(self) -> Iterator[list[Tensor]]:
        """The CPU tensors of the next message, in its block, which the sender uses again afterwards.

        They may be changed.
        """
        layout, block, _, _ = self._next_message()
        if block is None:
            yield self._empty(layout, b"")
            return
        assert isinstance(block, SharedBlock)
        try:
            yield block.places(layout)
        finally:
            block.release()

    def _next_message(self) -> tuple[Layout, SharedBlock | DeviceBlock | None, bytes, int]:
        """The layout of the next message, its block, which tensors are on the device, and its call."""
        datagram, descriptors = self._next_datagram()
        number, capacity, on_device, long, num_dropped, num_names, num_placed, *words = _DATAGRAM.unpack_from(datagram)
        call = of_words(*words)
        start = _DATAGRAM.size + 4 * num_dropped
        for dropped in struct.unpack_from(f"<{num_dropped}I", datagram, _DATAGRAM.size) if num_dropped else ():
            del self._blocks[dropped]
        if descriptors:
            self._open(number, capacity, on_device, descriptors, datagram[start : start + num_names])
        block = self._blocks.get(number)
        text = block.tail(long) if long and block is not None else datagram[start + num_names :]
        placed = b""
        if num_placed:
            text, placed = text[:-num_placed], text[-num_placed:]
        return decode(text), block, placed, call

    def receive_file(self) -> int:
        """The descriptor of the next memory file; no message may be in front of it."""
        _, (descriptor,) = self._next_datagram()
        return descriptor

    def _open(self, number: int, capacity: int, on_device: int, descriptors: Sequence[int], names: bytes) -> None:
        """Map a new block."""
        host, sharing = SharedBlock(number, descriptors[0], capacity), self._transport.sharing
        self._blocks[number] = host
        if on_device:
            assert sharing is not None
            memory = sharing.open(on_device, descriptors[1], names)
            self._blocks[number] = DeviceBlock(host, memory, sharing.device)
        for descriptor in descriptors:
            os.close(descriptor)

    def _empty(self, layout: Layout, placed: bytes) -> list[Tensor]:
        """Tensors without elements."""
        host = torch.device("cpu")
        sharing = self._transport.sharing if placed else None
        device = host if sharing is None else sharing.device.device
        return [
            torch.empty(shape, dtype=dtype, device=device if placed and placed[i] else host)
            for i, (shape, dtype, _) in enumerate(layout.specs)
        ]

    def discard(self) -> None:
        """Forget all blocks; what the device still reads stays mapped."""
        if self._transport.sharing is not None:
            blocks = self._blocks.values()
            self._transport.sharing.retire(block.is_read for block in blocks if isinstance(block, DeviceBlock))
        self._blocks.clear()

    @waits_for(lambda at: [at["self"].source_process])
    def _next_datagram(self) -> tuple[bytes, Sequence[int]]:
        spin_until = time.perf_counter() + self._transport.spin_seconds
        give_up, flags = None, _NO_WAIT
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_DATAGRAM_BYTES, 32, flags)
            except BlockingIOError:
                now = time.perf_counter()
                if now < spin_until:
                    self._transport.flush()  # another rank may wait for what did not fit into its socket
                    os.sched_yield()  # where ranks share a core, the sender may be the one that waits for it
                    continue
                give_up = give_up or now + self._transport.timeout_seconds
                flags = self._prepare_wait(give_up - now)
                continue
            except ConnectionResetError:
                data, ancillary = b"", []
            if not data:
                sender = self._channel.sender(self.source_process)
                raise PeerLost(f"{sender} ended while rank {self._channel.target} waited for it")
            if ancillary:
                return data, struct.unpack(f"{len(ancillary[0][2]) // 4}i", ancillary[0][2])
            return data, ()

    def _prepare_wait(self, seconds: float) -> int:
        """The flags of a receive that sleeps at most this long and gets its message by one system call."""
        if seconds <= 0:
            raise self._channel.timed_out(self._transport.timeout_seconds, self.source_process)
        if not self._transport.flush():
            self._poll.poll(1)
            return _NO_WAIT
        longest_ms = math.ceil(min(seconds, 3600.0) * 1000)
        if longest_ms != self._longest_ms:
            limit = struct.pack("@ll", longest_ms // 1000, longest_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._longest_ms = longest_ms
        return 0
