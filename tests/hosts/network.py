"""`Network`: carries packets between the hosts of a `Room`, with delay, with limited bandwidth, or not at all."""

from __future__ import annotations

import heapq
import os
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

_PACKET_BYTES = 1 << 16
_TARGET = slice(16, 20)  # of the header of an IPv4 packet


@dataclass
class Link:
    """One direction of a link.

    Attributes:
        cut: whether packets are lost.
        delay_seconds: of each packet.
        bytes_per_second: 0: unlimited.
        free_at: when the link has carried the packets so far (time.monotonic).
    """

    cut: bool = False
    delay_seconds: float = 0.0
    bytes_per_second: float = 0.0
    free_at: float = 0.0

    def arrival(self, now: float, num_bytes: int) -> float:
        """When a packet arrives that is sent now."""
        if self.bytes_per_second:
            self.free_at = max(now, self.free_at) + num_bytes / self.bytes_per_second
            now = self.free_at
        return now + self.delay_seconds


class Network:
    """A thread that reads packets from the network devices of hosts, and writes them to the others.

    Args:
        devices: TUN device of each host, by its IPv4 address. They are closed at the end.
    """

    def __init__(self, devices: dict[str, int]) -> None:
        self._devices = {socket.inet_aton(address): device for address, device in devices.items()}
        self._links = {(a, b): Link() for a in self._devices.values() for b in self._devices.values() if a != b}
        self._wake, self._ask = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()

    def link(self, source: str, target: str) -> Link:
        """The direction from one address to another, which may be changed."""
        return self._links[self._devices[socket.inet_aton(source)], self._devices[socket.inet_aton(target)]]

    def close(self) -> None:
        os.close(self._ask)
        self._thread.join()
        for device in (*self._devices.values(), self._wake):
            os.close(device)

    def _carry(self) -> None:
        under_way: list[tuple[float, int, int, bytes]] = []  # arrival, number, device, packet
        number, readable = 0, [self._wake, *self._devices.values()]
        while True:
            seconds = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            ready, _, _ = select.select(readable, [], [], seconds)
            if self._wake in ready:
                return
            for source in ready:
                packet = b""
                with suppress(BlockingIOError):
                    packet = os.read(source, _PACKET_BYTES)
                target = self._devices.get(packet[_TARGET]) if packet and packet[0] >> 4 == 4 else None
                link = self._links.get((source, target)) if target is not None else None
                if target is not None and link is not None and not link.cut:
                    number += 1
                    heapq.heappush(under_way, (link.arrival(time.monotonic(), len(packet)), number, target, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(under_way)
                with suppress(OSError):  # its interface is down
                    os.write(target, packet)
