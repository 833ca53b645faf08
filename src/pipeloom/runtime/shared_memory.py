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

import torch
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.runtime.shared_block import SharedBlock
from pipeloom.runtime.transport import Channel, Incoming, Lane, Outgoing, Transport
from pipeloom.runtime.values import Layout, decode

_DATAGRAM = struct.Struct("<IQ")  # block number, block length; then dropped blocks and the layout
_MAX_DATAGRAM_BYTES = 1 << 16
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
    def __init__(self, connection: socket.socket, backlogged: set[_Outgoing]) -> None:
        self._socket = connection
        self._blocks: list[SharedBlock] = []
        self._num_made = 0
        self._used_in_step: set[int] = set()
        self._dropped: list[int] = []
        self._backlog: deque[tuple[Layout, Sequence[Tensor]]] = deque()
        self._backlogged = backlogged

    def send(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        if self._backlog or not self._try_send(layout, tensors):
            self._backlog.append((layout, tensors))
            self._backlogged.add(self)

    def _try_send(self, layout: Layout, tensors: Sequence[Tensor]) -> bool:
        """Send unless the socket is full."""
        if layout.num_bytes == 0:
            return self._try_datagram(_DATAGRAM.pack(_NO_BLOCK, 0) + self._dropped_now() + layout.header, None)
        block = next((b for b in self._blocks if b.capacity >= layout.num_bytes and b.free), None)
        descriptor = None
        if block is None:
            block, descriptor = SharedBlock.create(self._num_made, layout.num_bytes)
        block.write(layout, tensors)
        head = _DATAGRAM.pack(block.number, block.capacity)
        sent = self._try_datagram(head + self._dropped_now() + layout.header, descriptor)
        if not sent:
            block.release()
        else:
            self._used_in_step.add(block.number)
            if descriptor is not None:
                self._num_made += 1
                self._blocks.append(block)
        if descriptor is not None:
            os.close(descriptor)
        return sent

    def _try_datagram(self, datagram: bytes, descriptor: int | None) -> bool:
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
            # The receiver is gone. Whoever waits for it learns that from its own channel, with a better message.
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise
        self._dropped.clear()
        return True

    def _dropped_now(self) -> bytes:
        return struct.pack(f"<I{len(self._dropped)}I", len(self._dropped), *self._dropped)

    def flush(self) -> bool:
        """Send what did not fit before; True when nothing is left."""
        while self._backlog and self._try_send(*self._backlog[0]):
            self._backlog.popleft()
        return not self._backlog

    def fileno(self) -> int:
        return self._socket.fileno()

    def end_step(self) -> None:
        """Unmap blocks that this step did not need."""
        idle = [b for b in self._blocks if b.number not in self._used_in_step and b.free]
        if idle:
            self._dropped.extend(block.number for block in idle)
            self._blocks = [block for block in self._blocks if block not in idle]
        self._used_in_step.clear()


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

    def receive(self) -> tuple[Layout, list[Tensor]]:
        datagram, descriptor = self._next_datagram()
        number, capacity = _DATAGRAM.unpack_from(datagram)
        (num_dropped,) = struct.unpack_from("<I", datagram, _DATAGRAM.size)
        start = _DATAGRAM.size + 4 * (1 + num_dropped)
        if num_dropped:
            for dropped in struct.unpack_from(f"<{num_dropped}I", datagram, _DATAGRAM.size + 4):
                del self._blocks[dropped]
        layout = decode(datagram[start:])
        if number == _NO_BLOCK:
            return layout, [torch.empty(shape, dtype=dtype) for shape, dtype, _ in layout.specs]
        if descriptor is not None:
            self._blocks[number] = SharedBlock(number, descriptor, capacity)
            os.close(descriptor)
        return layout, self._blocks[number].read(layout)

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
                self._outgoing[channel] = _Outgoing(connection, self._backlogged)
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
        while not self.flush():
            select.select([], list(self._backlogged), [], 0.1)
        for end in self._outgoing.values():
            end.end_step()

    def close(self) -> None:
        deadline = time.perf_counter() + 5.0
        while not self.flush() and time.perf_counter() < deadline:
            select.select([], list(self._backlogged), [], 0.1)
        for connection in (*self._sockets, self._listener):
            connection.close()
        self._outgoing.clear()
        self._incoming.clear()
