"""The all-gather of small payloads that the ranks of a save need, for each kind of rank.

`LocalExchange` is for a single process, `ThreadExchange` for ranks that are threads, `DistributedExchange` for
processes under torch.distributed. None of them pickles objects.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    import torch.distributed


class Exchange(Protocol):
    """The ranks that save one checkpoint together."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, by rank. Blocks until all ranks have called it."""
        ...


class LocalExchange:
    """The exchange of a single process, also one that runs all pipeline ranks."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class ThreadExchange:
    """The exchange of ranks that are threads of one process; `ThreadExchange.group(n)` creates one per rank."""

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
        """Raises threading.BrokenBarrierError on every rank after `abort()` on one."""
        self._slots[self.rank] = payload
        self._barrier.wait()
        payloads = list(self._slots)
        self._barrier.wait()  # all ranks must have read the slots before one writes for the next exchange
        return payloads

    def abort(self) -> None:
        """Raise an error on the waiting ranks. Call it when this rank fails."""
        self._barrier.abort()


class DistributedExchange:
    """The exchange of the processes of a torch.distributed group.

    Args:
        group: the process group; defaults to all processes.
        device: the device of the group's backend: CPU for gloo, the CUDA device of the rank for NCCL.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        import torch.distributed as dist

        from pipeloom.processes.collectives import let_gloo_finish

        let_gloo_finish()
        self._group = group
        self._device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        from pipeloom.processes.collectives import all_gather_bytes

        return all_gather_bytes(payload, self._group, self._device)
