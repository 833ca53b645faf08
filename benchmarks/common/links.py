"""Links with latency, emulated alike for every system.

The time of each send is noted in memory that all ranks map, one slot per message of a directed channel; a receive is
complete when the message is there and its latency has passed since the send. Senders are never held up, and no message
is added or changed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

_MESSAGES_IN_FLIGHT = 4096  # slots of a channel; more messages than this are never under way
_NUM_LANES = 4  # enough for the lanes of pipeloom's transports; torch uses lane 0


class EmulatedLinks:
    """The notes of one system on all its ranks.

    Args:
        path: a file that all ranks map; made if absent, so give each system its own.
        num_ranks: number of ranks.
        rank: of this process.
        latency_seconds: from the send to the earliest arrival.
    """

    def __init__(self, path: Path, num_ranks: int, rank: int, latency_seconds: float) -> None:
        shape = (num_ranks, num_ranks, _NUM_LANES, _MESSAGES_IN_FLIGHT)
        with open(path, "ab") as file:
            file.truncate(8 * int(np.prod(shape)))
        self._sent_at = np.memmap(path, dtype=np.float64, mode="r+", shape=shape)
        self._rank = rank
        self._num_sent: dict[tuple[int, int], int] = defaultdict(int)
        self._num_posted: dict[tuple[int, int], int] = defaultdict(int)
        self.latency_seconds = latency_seconds

    def note_send(self, target: int, lane: int = 0) -> None:
        """To be called just before the next message to `target` is sent."""
        index = self._num_sent[target, lane]
        self._num_sent[target, lane] = index + 1
        self._sent_at[self._rank, target, lane, index % _MESSAGES_IN_FLIGHT] = time.monotonic()

    def next_arrival(self, source: int, lane: int = 0) -> tuple[int, int, int]:
        """The slot of the next message from `source`."""
        index = self._num_posted[source, lane]
        self._num_posted[source, lane] = index + 1
        return source, lane, index % _MESSAGES_IN_FLIGHT

    def remaining_seconds(self, slot: tuple[int, int, int]) -> float:
        """How long the message in `slot`, which is here, is still to be thought of as under way."""
        source, lane, index = slot
        sent_at = float(self._sent_at[source, self._rank, lane, index])
        return sent_at + self.latency_seconds - time.monotonic()

    def wait(self, slot: tuple[int, int, int]) -> None:
        """Sleep until the message in `slot`, which is here, has arrived."""
        if (remaining := self.remaining_seconds(slot)) > 0:
            time.sleep(remaining)

    @contextmanager
    def delaying_torch(self) -> Iterator[None]:
        """Within this, the messages of torch.distributed.pipelining's schedules have the latency."""
        from torch.distributed.pipelining import schedules

        original = schedules._batch_p2p

        def delayed(operations: list[dist.P2POp], desc: str | None = None) -> list[Any]:
            for operation in operations:
                if operation.op is dist.isend:
                    self.note_send(operation.peer)
            works = original(operations, desc)
            return [
                _DelayedWork(work, self, self.next_arrival(operation.peer)) if operation.op is dist.irecv else work
                for operation, work in zip(operations, works, strict=True)
            ]

        schedules._batch_p2p = delayed
        try:
            yield
        finally:
            schedules._batch_p2p = original


class _DelayedWork:
    """A `dist.Work` of a receive that is complete when the emulated latency has passed."""

    def __init__(self, work: dist.Work, links: EmulatedLinks, slot: tuple[int, int, int]) -> None:
        self._work, self._links, self._slot = work, links, slot

    def wait(self) -> None:
        self._work.wait()
        self._links.wait(self._slot)
