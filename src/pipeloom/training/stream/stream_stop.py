"""`StreamStop`: after which batch a stream drains because a signal asks for it, the same on all processes.

A stream has no collective per batch that could tell all processes. A thread of each process looks into the store of the
process group instead, five times a second, so batches wait for nothing before there is a signal:

    asked        a process got a signal
    begun/RANK   the last batch that a process had begun when it saw this; it begins no other one before it knows more

From these batches all processes compute the same first batch that does not run. At least one that they have not begun
comes before it, so that each rank knows the last update of a stage before it makes it.
"""

import threading
from typing import Any

import torch.distributed as dist

from pipeloom.processes.preemption import Preemption

_LOOK_SECONDS = 0.2


class StreamStop:
    """One process's part; threads that act as processes share one.

    Args:
        preemption: of this process.
        period: batches after which every stage has updated.
        rank, size: of this process among those with a process group; a single one decides by itself.
    """

    def __init__(self, preemption: Preemption, period: int, rank: int, size: int) -> None:
        self._preemption, self._period, self._rank, self._size = preemption, period, rank, size
        self._changed = threading.Condition()
        self._begun = -1
        self._held: int | None = None  # the first batch that waits until `_stop` is known
        self._stop: int | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if size > 1 and preemption.listens:
            self._thread = threading.Thread(target=self._look, name="pipeloom-stream-stop", daemon=True)
            self._thread.start()

    @property
    def asked(self) -> bool:
        """Whether this process knows that one was asked."""
        return self._preemption.asked or self._held is not None or self._stop is not None

    def before(self, batch: int) -> int | None:
        """The batch before which the stream ends; None: not known yet. Each rank asks before it begins a batch."""
        with self._changed:
            if self._thread is None and self._preemption.asked and self._stop is None:
                self._decide(max(self._begun, batch - 1))
            while self._stop is None and self._held is not None and batch >= self._held:
                self._changed.wait()
            self._begun = max(self._begun, batch)
            return self._stop

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _decide(self, begun: int) -> None:
        self._stop = (max(begun, 0) // self._period + 2) * self._period
        self._changed.notify_all()

    def _look(self) -> None:
        shared: Any = dist.distributed_c10d._get_default_store()
        store, told = shared.clone(), False  # waits of other threads do not hold it
        while not self._closed.wait(_LOOK_SECONDS):
            if self._preemption.asked and not told:
                store.set("pipeloom/preempt/asked", "")
                told = True
            if not store.check(["pipeloom/preempt/asked"]):
                continue
            with self._changed:
                self._held = self._begun + 1
                store.set(f"pipeloom/preempt/begun/{self._rank}", str(self._begun))
            begun = self._all_begun(store)
            with self._changed:
                if begun:
                    self._decide(max(begun))
            return

    def _all_begun(self, store: Any) -> list[int]:
        """What every process has begun; nothing once this process is closed, or another one is gone."""
        keys = [f"pipeloom/preempt/begun/{rank}" for rank in range(self._size)]
        while not self._closed.is_set():
            if store.check(keys):
                return [int(store.get(key)) for key in keys]
            self._closed.wait(_LOOK_SECONDS / 4)
        return []
