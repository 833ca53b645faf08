"""Messages between ranks that are processes of one Linux host: shared memory for the bytes, a socket for the rest.

    sender                                                                        receiver
      │ copy the tensors into a free block (anonymous memory, memfd)                 │
      │ ── one datagram: block number, layout ── Unix socket ──────────────────────▶ │ tensors are views of the block
      │ block is free ◀── first byte of the block set to 0 when the last view dies ──│

A message takes one copy, and one system call per side. A small message is copied out again, which takes less time than
a view. The socket also wakes a sleeping receiver, and carries the descriptor of a new block. It closes when a process
dies, so a lost peer is noticed at once. Sockets have abstract names and blocks have none, so no file is left behind,
however a process ends.

A channel owns as many blocks as it had messages in flight in the last step; other blocks are unmapped at the end of the
step. A full socket never blocks the sender: the message waits in a list until the next call.

Tensors on a CUDA device travel in blocks with memory of that device (`transport.device_block`), by the same datagrams.
Processes that share a device exchange messages in this way too.
"""

import atexit
import json
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from pipeloom.common.cores import usable_cores
from pipeloom.devices.sharing import MemorySharing
from pipeloom.errors import PeerLost, listed
from pipeloom.processes.waits import waits_for
from pipeloom.transport.interface import Channel, Incoming, Lane, Outgoing, Transport
from pipeloom.transport.shared_channel import SharedIncoming, SharedOutgoing

# A sleeping receiver wakes about 30 us late, with cold caches and, on a shared host, often without a free core. Shorter
# waits than this occur between ranks that compute alternately; a rank that waits longer is in a bubble and may sleep.
SPIN_SECONDS = 2e-3
_CLOSING_SECONDS = 5.0


def available() -> bool:
    """Whether this host supports the transport: Linux with memfd and abstract sockets."""
    return hasattr(os, "memfd_create") and hasattr(socket, "SOCK_SEQPACKET")


def host_identity() -> str:
    """A text that is equal for two processes exactly when this transport can connect them."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            parts.append(os.readlink(path) if path.endswith("net") else Path(path).read_text().strip())
        except OSError:
            parts.append(socket.gethostname())
    return "/".join(parts)


class SharedMemoryTransport(Transport):
    """Channels between processes of one host.

    Args:
        rank: pipeline rank of this process.
        exchange: gathers the bytes of every process on every process; called once.
        processes: for each pipeline rank, its index in the result of `exchange`. None: the rank itself.
        timeout_seconds: how long a receive may wait.
        spin_seconds: how long a receive polls before it sleeps. None: `SPIN_SECONDS` where every process on this host
            has its own core, else 0.
        sharing: of the memory of this process's CUDA device; None: messages hold CPU tensors alone.
    """

    def __init__(
        self,
        rank: int,
        exchange: Callable[[bytes], list[bytes]],
        *,
        processes: Sequence[int] | None = None,
        timeout_seconds: float = 1800.0,
        spin_seconds: float | None = None,
        sharing: MemorySharing | None = None,
    ) -> None:
        self._rank, self.sharing = rank, sharing
        self._outgoing: dict[Channel, SharedOutgoing] = {}
        self._incoming: dict[Channel, SharedIncoming] = {}
        self._sockets: list[socket.socket] = []
        self._backlogged: set[SharedOutgoing] = set()
        self.timeout_seconds = timeout_seconds
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"\0pipeloom-{uuid.uuid4().hex}"
        self._listener.bind(name)
        self._listener.listen(1024)
        identity, reach = (sharing.identity, list(sharing.reach)) if sharing is not None else ("", [""])
        hello = {"host": host_identity(), "name": name, "device": identity, "reach": reach}
        everybody = [json.loads(answer) for answer in exchange(json.dumps(hello).encode())]
        self.processes = range(len(everybody)) if processes is None else processes
        self._addresses = everybody if processes is None else [everybody[process] for process in processes]
        local = sum(address["host"] == self._addresses[rank]["host"] for address in everybody)
        if spin_seconds is None:
            spin_seconds = SPIN_SECONDS if local <= usable_cores() else 0.0
        self.spin_seconds = spin_seconds
        if sharing is not None:  # receivers read device memory only while its owner exists
            atexit.register(self.close)

    def reaches(self, peer: int, *, of: int) -> bool:
        """Whether ranks `peer` and `of` run on one host, on devices that reach each other; the same on every rank."""
        one, other = self._addresses[peer], self._addresses[of]
        return one["host"] == other["host"] and one["device"] in other["reach"] and other["device"] in one["reach"]

    @waits_for(lambda at: [at["self"].processes[channel.source] for channel in at.get("expected", ())])
    def open(self, channels: Iterable[Channel]) -> None:
        channels = list(channels)
        for channel in channels:
            if channel.source == self._rank and channel not in self._outgoing:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._sockets.append(connection)
                connection.settimeout(self.timeout_seconds)
                connection.connect(self._addresses[channel.target]["name"])
                connection.send(json.dumps(channel).encode())
                connection.setblocking(False)
                self._outgoing[channel] = SharedOutgoing(connection, channel, self._backlogged, self.sharing)
        expected = {c for c in channels if c.target == self._rank} - self._incoming.keys()
        self._listener.settimeout(self.timeout_seconds)
        while expected:
            connection = self._listener.accept()[0]
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if user != os.getuid():  # other users of the host can connect too
                connection.close()
                continue
            self._sockets.append(connection)
            source, target, lane = json.loads(connection.recv(4096))
            channel = Channel(source, target, Lane(lane))
            self._incoming[channel] = SharedIncoming(connection, channel, self)
            expected.discard(channel)

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._outgoing[channel]

    def incoming(self, channel: Channel) -> Incoming:
        return self._incoming[channel]

    def flush(self) -> bool:
        """Try to send what did not fit into the sockets; returns whether nothing is left."""
        if self._backlogged:
            for end in [end for end in self._backlogged if end.flush()]:
                self._backlogged.discard(end)
        return not self._backlogged

    def end_step(self) -> None:
        self._drain(self.timeout_seconds)
        for end in self._outgoing.values():
            end.end_step()

    @waits_for(lambda at: [at["self"].processes[end.channel.target] for end in [*at["self"]._backlogged]])
    def _drain(self, seconds: float) -> None:
        """Wait until all messages are in the sockets."""
        deadline = time.perf_counter() + seconds
        while not self.flush():
            if time.perf_counter() > deadline:
                targets = listed(sorted({end.channel.target for end in self._backlogged}))
                raise PeerLost(
                    f"rank {targets} did not take all messages of rank {self._rank} within {seconds:g} s "
                    "(timeout_seconds), although its process exists. Look whether it is stopped, in a debugger, or "
                    "waits for another call."
                )
            poll = select.poll()
            for end in self._backlogged:
                poll.register(end, select.POLLOUT)
            poll.poll(100)

    def close(self) -> None:
        if not self._sockets and self._listener.fileno() < 0:
            return
        with suppress(PeerLost):
            self._drain(_CLOSING_SECONDS)
        for outgoing in self._outgoing.values():
            outgoing.discard()
        for incoming in self._incoming.values():
            incoming.discard()
        for connection in (*self._sockets, self._listener):
            connection.close()
        self._sockets.clear()
        self._outgoing.clear()
        self._incoming.clear()
        if self.sharing is not None:
            atexit.unregister(self.close)
            self.sharing.finish(_CLOSING_SECONDS)
