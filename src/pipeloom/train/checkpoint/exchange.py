"""How the ranks of a save tell each other small things: bytes in, everybody's bytes out.

Saving a checkpoint needs one collective only, so that is the whole interface. `LocalExchange` serves one process,
`ThreadExchange` ranks that are threads, `DistributedExchange` ranks that are processes under torch.distributed.
None of them pickles an object.
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
        """Every rank's payload, by rank. Returns on no rank before all have called it."""
        ...


class LocalExchange:
    """The exchange of a process that is alone (however many pipeline ranks it drives one after another)."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class ThreadExchange:
    """The exchange of ranks that are threads of one process; `ThreadExchange.group(n)` makes one for each."""

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
        answer = list(self._slots)
        self._barrier.wait()  # nobody may fill a slot for the next exchange before all have read this one
        return answer

    def abort(self) -> None:
        """Wake the other ranks with an error: call it when this rank ends early."""
        self._barrier.abort()


class DistributedExchange:
    """The exchange of the processes of a torch.distributed group.

    `device` is where the group's backend wants its tensors: the CPU for gloo, the rank's own CUDA device for NCCL.
    """

    def __init__(self, group: torch.distributed.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        import torch.distributed as dist

        from pipeloom.processes.gloo_threads import let_gloo_finish

        let_gloo_finish()
        self._group = group
        self._device = device
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        from pipeloom.processes.collectives import all_gather_bytes

        return all_gather_bytes(payload, self._group, self._device)
