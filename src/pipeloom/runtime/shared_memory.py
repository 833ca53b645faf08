"""Messages between ranks that are processes of one Linux machine: shared memory for the bytes, a socket for the rest.

    sender                                                                        receiver
      │ copy the tensors into a free block (anonymous memory, memfd)                 │
      │ ── one datagram: block number, layout ── Unix socket ──────────────────────▶ │ tensors are views of the block
      │ block is free ◀── first byte of the block set to 0 when the last view dies ──│

One copy, one system call on each side. The socket also wakes a sleeping receiver, carries the descriptor of a new
block, and closes by itself when a process dies, so a lost peer is noticed at once. Sockets have abstract names and
blocks have none: nothing is left in any file system, however a process ends.

A channel owns as many blocks as messages were in flight at once in the last step; what a step did not need is unmapped
at its end. A full socket never blocks the sender: what does not fit waits in a list until the next call.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.runtime.shared_block import SharedBlock
from pipeloom.runtime.transport import Channel, Incoming, Lane, Message, Outgoing, Transport
from pipeloom.runtime.values import Layout, decode

# Block number, block capacity, call, length of a layout that is in the block and not here, number of dropped blocks;
# then the numbers of the dropped blocks and the layout.
_DATAGRAM = struct.Struct("<IQQII")
_MAX_DATAGRAM_BYTES = 1 << 16
_MAX_LAYOUT_BYTES = 1 << 14  # a longer one goes into the block
_MAX_DROPPED = 1 << 12  # blocks named in one datagram
_NO_BLOCK = 0xFFFFFFFF
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT)


def available() -> bool:
    """Whether this machine has what the transport needs (Linux with memfd and abstract sockets)."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")


def host_identity() -> str:
    """A text that two processes share exactly when they can use this transport with each other."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(os.readlink(path) if path.endswith("net") else open(path).read().strip())  # noqa: SIM115
        except OSError:
            parts.append(socket.gethostname())
    return "/".join(parts)


class _Outgoing(Outgoing):
    def __init__(self, connection: socket.socket, channel: Channel, backlogged: set[_Outgoing]) -> None:
        self._socket = connection
        self._channel = channel
        self._blocks: list[SharedBlock] = []
        self._num_made = 0
        self._used_in_step: set[int] = set()
        self._dropped: list[int] = []
        self._unsent: tuple[bytes, int | None] | None = None  # the datagram that the socket would not take
        self._backlog: deque[tuple[Layout, Sequence[Tensor], int]] = deque()  # what is to follow it
        self._backlogged = backlogged
        self._lost = False

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        if self._unsent is not None and not self.flush():
            self._backlog.append((layout, tensors, call))
        elif not self._put(layout, tensors, call):
            self._backlogged.add(self)

    def _put(self, layout: Layout, tensors: Sequence[Tensor], call: int) -> bool:
        """Copy a message into a block and send its datagram, or keep that until the socket has room."""
        dropped, self._dropped = self._dropped[:_MAX_DROPPED], self._dropped[_MAX_DROPPED:]
        long = layout.header if len(layout.header) > _MAX_LAYOUT_BYTES else b""
        number, capacity, descriptor = _NO_BLOCK, 0, None
        if layout.num_bytes or long:
            need = layout.num_bytes + len(long)
            block = next((b for b in self._blocks if b.capacity >= need and b.free), None)
            if block is None:
                block, descriptor = SharedBlock.create(self._num_made, need)
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
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors on their way: as good as full
                return False
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
            # The receiver is gone. Whoever waits for it learns that from its own channel; end_step tells all others.
            self._lost = True
        self._unsent = None
        if descriptor is not None:
            os.close(descriptor)
        return True

    def flush(self) -> bool:
        """Send what did not fit before; True when nothing is left."""
        while self._unsent is None or self._push():
            if not self._backlog:
                return True
            if not self._put(*self._backlog.popleft()):
                return False
        return False

    @property
    def channel(self) -> Channel:
        return self._channel

    def fileno(self) -> int:
        return self._socket.fileno()

    def end_step(self) -> None:
        """Unmap blocks that this step did not need."""
        if self._lost:
            raise PeerLost(f"rank {self._channel.target} ended before it had taken what this rank sent")
        if len(self._blocks) > len(self._used_in_step):
            idle = [b for b in self._blocks if b.number not in self._used_in_step and b.free]
            self._dropped.extend(block.number for block in idle)
            self._blocks = [block for block in self._blocks if block not in idle]
        self._used_in_step.clear()

    def discard(self) -> None:
        """Forget what was never sent."""
        if self._unsent is not None and self._unsent[1] is not None:
            os.close(self._unsent[1])
        self._unsent = None
        self._backlog.clear()
        self._backlogged.discard(self)


class _Incoming(Incoming):
    def __init__(self, connection: socket.socket, channel: Channel, transport: SharedMemoryTransport) -> None:
        self._socket = connection
        self._channel = channel
        self._transport = transport
        self._blocks: dict[int, SharedBlock] = {}
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

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

    def _next_datagram(self) -> tuple[bytes, int | None]:
        spin_until = time.perf_counter() + self._transport.spin_seconds
        give_up = None
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MAX_DATAGRAM_BYTES, 32, _RECEIVE_FLAGS)
            except BlockingIOError:
                now = time.perf_counter()
                if now < spin_until:
                    continue
                give_up = give_up or now + self._transport.timeout_seconds
                self._sleep(give_up - now)
                continue
            except ConnectionResetError:
                data, ancillary = b"", []
            if not data:
                raise PeerLost(f"rank {self._channel.source} ended while rank {self._channel.target} waited for it")
            if ancillary:
                return data, struct.unpack("i", ancillary[0][2][:4])[0]
            return data, None

    def _sleep(self, seconds: float) -> None:
        if seconds <= 0:
            raise PeerLost(
                f"rank {self._channel.target} waited {self._transport.timeout_seconds:g} s for rank "
                f"{self._channel.source}: it runs but sends nothing"
            )
        if self._transport.flush():
            self._poll.poll(min(seconds, 3600.0) * 1000)
        else:  # somebody may be waiting for what this rank could not send yet
            self._poll.poll(1)


class SharedMemoryTransport(Transport):
    """Channels between processes of one machine.

    Args:
        rank: this process's rank.
        exchange: gathers every rank's bytes on every rank, in order of rank; called once.
        timeout_seconds: how long a receive may wait.
        spin_seconds: how long a receive looks again and again before it sleeps; waking costs some 30 us. None: 200 us
            where every rank has a core of its own, else 0.
    """

    def __init__(
        self,
        rank: int,
        exchange: Callable[[bytes], list[bytes]],
        *,
        timeout_seconds: float = 1800.0,
        spin_seconds: float | None = None,
    ) -> None:
        self._rank = rank
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._incoming: dict[Channel, _Incoming] = {}
        self._sockets: list[socket.socket] = []
        self._backlogged: set[_Outgoing] = set()
        self.timeout_seconds = timeout_seconds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"\0pipeloom-{uuid.uuid4().hex}"
        self._listener.bind(name)
        self._listener.listen(1024)
        hello = json.dumps({"host": host_identity(), "name": name}).encode()
        self._addresses = [json.loads(answer) for answer in exchange(hello)]
        local = sum(address["host"] == self._addresses[rank]["host"] for address in self._addresses)
        if spin_seconds is None:
            spin_seconds = 200e-6 if local <= len(os.sched_getaffinity(0)) else 0.0
        self.spin_seconds = spin_seconds

    def reaches(self, peer: int, *, of: int) -> bool:
        """Whether ranks `peer` and `of` run on one machine; every rank gives the same answer."""
        return bool(self._addresses[peer]["host"] == self._addresses[of]["host"])

    def open(self, channels: Iterable[Channel]) -> None:
        channels = list(channels)
        for channel in channels:
            if channel.source == self._rank and channel not in self._outgoing:
                connection = self._new_socket(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.settimeout(self.timeout_seconds)
                connection.connect(self._addresses[channel.target]["name"])
                connection.send(json.dumps(channel).encode())
                connection.setblocking(False)
                self._outgoing[channel] = _Outgoing(connection, channel, self._backlogged)
        expected = {c for c in channels if c.target == self._rank} - self._incoming.keys()
        self._listener.settimeout(self.timeout_seconds)
        while expected:
            connection = self._new_socket(self._accept())
            source, target, lane = json.loads(connection.recv(4096))
            connection.setblocking(False)
            channel = Channel(source, target, Lane(lane))
            self._incoming[channel] = _Incoming(connection, channel, self)
            expected.discard(channel)

    def _accept(self) -> socket.socket:
        """The next connection of a process of this user; anybody on the machine can see the listener's name."""
        while True:
            connection = self._listener.accept()[0]
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user == os.getuid():
                return connection
            connection.close()

    def _new_socket(self, connection: socket.socket) -> socket.socket:
        self._sockets.append(connection)
        return connection

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._outgoing[channel]

    def incoming(self, channel: Channel) -> Incoming:
        return self._incoming[channel]

    def flush(self) -> bool:
        """Try to send what did not fit into a socket; True when nothing is left anywhere."""
        if self._backlogged:
            for end in [end for end in self._backlogged if end.flush()]:
                self._backlogged.discard(end)
        return not self._backlogged

    def end_step(self) -> None:
        self._drain(self.timeout_seconds)
        for end in self._outgoing.values():
            end.end_step()

    def _drain(self, seconds: float) -> None:
        """Wait until all that was sent is in the sockets."""
        deadline = time.perf_counter() + seconds
        while not self.flush():
            if time.perf_counter() > deadline:
                targets = sorted({end.channel.target for end in self._backlogged})
                raise PeerLost(
                    f"ranks {targets} took nothing for {seconds:g} s: they run but do not receive what this rank sent"
                )
            poll = select.poll()
            for end in self._backlogged:
                poll.register(end, select.POLLOUT)
            poll.poll(100)

    def close(self) -> None:
        if not self._sockets and self._listener.fileno() < 0:
            return
        with suppress(PeerLost):
            self._drain(5.0)
        for end in self._outgoing.values():
            end.discard()
        for connection in (*self._sockets, self._listener):
            connection.close()
        self._sockets.clear()
        self._outgoing.clear()
        self._incoming.clear()
