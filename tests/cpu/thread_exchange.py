"""`ThreadExchange`: the exchange of a checkpoint between ranks that are threads of one process."""

from __future__ import annotations

import threading

from pipeloom.processes.exchange import Exchange


class ThreadExchange(Exchange):
    """`ThreadExchange.group(n)` makes one for each rank."""

    def __init__(self, rank: int, slots: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(slots)
        self._slots = slots
        self._barrier = barrier

    @classmethod
    def group(cls, size: int) -> list[ThreadExchange]:
        slots, barrier = [b""] * size, threading.Barrier(size)
        return [cls(rank, slots, barrier) for rank in range(size)]

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._slots[self.rank] = payload
        self._barrier.wait()
        payloads = list(self._slots)
        self._barrier.wait()  # all ranks must have read the slots before one writes for the next exchange
        return payloads
