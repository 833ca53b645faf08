"""`Mover`: the two threads that read and write a store."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

from pipeloom.parallel.offload.store import Store


class Mover:
    """Reads a store in one thread and writes it in another, each in the order of the calls.

    Attributes:
        wait_seconds: how long callers have waited so far.
        closed: after `close`.
    """

    def __init__(self, store: Store) -> None:
        self.store, self.wait_seconds, self.closed = store, 0.0, False
        self._reader = ThreadPoolExecutor(1, "pipeloom-reload")
        self._writer = ThreadPoolExecutor(1, "pipeloom-offload")

    def read(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `task`, which reads, after all earlier reads."""
        return self._reader.submit(task, *arguments)

    def write(self, task: Callable[..., None], *arguments: Any) -> Future[None]:
        """Run `task`, which writes, after all earlier writes."""
        return self._writer.submit(task, *arguments)

    def wait(self, future: Future[None]) -> None:
        """Wait for a task; raises what it raised."""
        if not future.done():
            start = perf_counter()
            future.exception()
            self.wait_seconds += perf_counter() - start
        future.result()

    def stop(self) -> None:
        """End the threads after their current tasks."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)

    def close(self) -> None:
        """End the threads and close the store."""
        self.closed = True
        self.stop()
        self.store.close()
