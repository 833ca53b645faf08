"""`Mover`: the two threads through which everything goes to a store and comes back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter

from pipeloom.parallel.offload.store import Store


class Mover:
    """Reads in one thread and writes in another, each in the order in which it is asked.

    Args:
        store: to which it moves.

    Attributes:
        wait_seconds: how long callers have waited so far.
        closed: after `close`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.wait_seconds = 0.0
        self.closed = False
        self._reader = ThreadPoolExecutor(1, "pipeloom-reload")
        self._writer = ThreadPoolExecutor(1, "pipeloom-offload")

    def read(self, task: Callable[[], None]) -> Future[None]:
        """Do `task`, which reads, behind all reads before it."""
        return self._reader.submit(task)

    def write(self, task: Callable[[], None]) -> Future[None]:
        """Do `task`, which writes, behind all writes before it."""
        return self._writer.submit(task)

    def wait(self, future: Future[None]) -> None:
        """Until it is done; raises what it raised."""
        if not future.done():
            start = perf_counter()
            future.exception()
            self.wait_seconds += perf_counter() - start
        future.result()

    def stop(self) -> None:
        """Let go of threads, behind what they do now."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Let go of threads and store."""
        self.closed = True
        self.stop()
        self.store.close()
