"""The two ends of a channel over shared memory (see `pipeloom.transport.shared_memory`)."""

import errno
import math
import mmap
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.processes.waits import waits_for
from pipeloom.transport.interface import Channel, Incoming, Message, Outgoing
from pipeloom.transport.shared_block import HEAD_BYTES, SharedBlock
from pipeloom.transport.values import Layout, decode

# Block number, block capacity, call, length of a layout that is in the block and not here, number of dropped blocks;
# then the numbers of the dropped blocks and the layout.
_DATAGRAM = struct.Struct("<IQQII")
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

    def flush(self) -> bool:
        """Try to send what did not fit into the sockets; returns whether nothing is left."""


class SharedOutgoing(Outgoing):
    """Copies messages into blocks; a send never waits."""

    def __init__(self, connection: socket.socket, channel: Channel, backlogged: set["SharedOutgoing"]) -> None:
        self._socket, self.channel = connection, channel
        self._blocks: list[SharedBlock] = []
        self._num_made = 0
        self._used_in_step: set[int] = set()
        self._dropped: list[int] = []
        self._unsent: tuple[bytes, int | None] | None = None  # a datagram for which the socket had no room
        self._backlog: deque[tuple[Layout, Sequence[Tensor], int]] = deque()  # messages after it
        self._backlogged = backlogged
        self._lost = False

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        if self._unsent is not None and not self.flush():
            self._backlog.append((layout, tensors, call))
        elif not self._put(layout, tensors, call):
            self._backlogged.add(self)

    def _put(self, layout: Layout, tensors: Sequence[Tensor], call: int) -> bool:
        """Copy a message into a block and send its datagram, or keep that until the socket has room."""
        dropped: list[int] = []
        if self._dropped:
            dropped, self._dropped = self._dropped[:_MAX_DROPPED], self._dropped[_MAX_DROPPED:]
        long = layout.header if len(layout.header) > _MAX_LAYOUT_BYTES else b""
        number, capacity, descriptor = _NO_BLOCK, 0, None
        if layout.num_bytes or long:
            need = layout.num_bytes + len(long)
            block = next((b for b in self._blocks if b.capacity >= need and b.free), None)
            if block is None:
                capacity = -(-need // mmap.PAGESIZE) * mmap.PAGESIZE
                descriptor = os.memfd_create("pipeloom", os.MFD_CLOEXEC)
                os.ftruncate(descriptor, HEAD_BYTES + capacity)
                block = SharedBlock(self._num_made, descriptor, capacity)
                self._num_made += 1
                self._blocks.append(block)
            block.write(layout, tensors, long)
            self._used_in_step.add(block.number)
            number, capacity = block.number, block.capacity
        head = _DATAGRAM.pack(number, capacity, call, len(long), len(dropped))
        names = struct.pack(f"<{len(dropped)}I", *dropped) if dropped else b""
        self._unsent = (head + names + (b"" if long else layout.header), descriptor)
        return self._push()

    def _push(self) -> bool:
        """Send the waiting datagram; False if the socket is full."""
        assert self._unsent is not None
        datagram, descriptor = self._unsent
        try:
            if descriptor is None:
                self._socket.send(datagram, _SEND_FLAGS)
            else:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))
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
        if descriptor is not None:
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
            idle = [b for b in self._blocks if b.number not in self._used_in_step and b.free]
            self._dropped.extend(block.number for block in idle)
            self._blocks = [block for block in self._blocks if block not in idle]
        self._used_in_step.clear()

    def discard(self) -> None:
        """Drop everything that was not sent."""
        if self._unsent is not None and self._unsent[1] is not None:
            os.close(self._unsent[1])
        self._unsent = None
        self._backlog.clear()
        self._backlogged.discard(self)


class SharedIncoming(Incoming):
    """Makes tensors of the blocks that datagrams name; its socket blocks."""

    def __init__(self, connection: socket.socket, channel: Channel, transport: Waiting) -> None:
        self._socket, self._channel, self._transport = connection, channel, transport
        self._blocks: dict[int, SharedBlock] = {}
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
        datagram, descriptor = self._next_datagram()
        number, capacity, call, long, num_dropped = _DATAGRAM.unpack_from(datagram)
        start = _DATAGRAM.size + 4 * num_dropped
        for dropped in struct.unpack_from(f"<{num_dropped}I", datagram, _DATAGRAM.size) if num_dropped else ():
            del self._blocks[dropped]
        if descriptor is not None:
            self._blocks[number] = SharedBlock(number, descriptor, capacity)
            os.close(descriptor)
        if number == _NO_BLOCK:
            layout = decode(datagram[start:])
            return Message(layout, [torch.empty(shape, dtype=dtype) for shape, dtype, _ in layout.specs], call)
        block = self._blocks[number]
        layout = decode(block.tail(long) if long else datagram[start:])
        return Message(layout, block.read(layout), call)

    @waits_for(lambda at: [at["self"].source_process])
    def _next_datagram(self) -> tuple[bytes, int | None]:
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
                raise PeerLost(f"rank {self._channel.source} ended while rank {self._channel.target} waited for it")
            if ancillary:
                return data, struct.unpack("i", ancillary[0][2][:4])[0]
            return data, None

    def _prepare_wait(self, seconds: float) -> int:
        """The flags of a receive that sleeps at most this long and gets its message by one system call."""
        if seconds <= 0:
            raise self._channel.timed_out(self._transport.timeout_seconds)
        if not self._transport.flush():
            self._poll.poll(1)
            return _NO_WAIT
        longest_ms = math.ceil(min(seconds, 3600.0) * 1000)
        if longest_ms != self._longest_ms:
            limit = struct.pack("@ll", longest_ms // 1000, longest_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._longest_ms = longest_ms
        return 0
