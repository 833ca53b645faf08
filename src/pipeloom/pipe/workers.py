"""One thread per partition, which lives as long as its pipe."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from pipeloom.pipe.calls.devices import Receiver

Task = Callable[[], None]


class Workers:
    """Threads that run tasks, each in the order in which it got them. A task never waits for another one.

    Partitions on the CPU share its cores evenly.

    Args:
        devices: the device of each partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._process = os.getpid()
        self.receivers = [Receiver(device) for device in devices]
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in devices]
        cores = torch.get_num_threads()
        on_cpu = sum(device.type == "cpu" for device in devices)
        started = threading.Barrier(len(devices) + 1)
        threads = []
        for index, (queue, receiver) in enumerate(zip(self._queues, self.receivers, strict=True)):
            share = max(1, cores // on_cpu) if receiver.device.type == "cpu" else None
            threads.append(
                threading.Thread(
                    target=_work, args=(queue, receiver, share, started), name=f"pipe-{index}", daemon=True
                )
            )
            threads[-1].start()
        started.wait()
        torch.set_num_threads(cores)  # for the threads that start later
        self._end = weakref.finalize(self, _stop, self._queues, threads)

    @property
    def usable(self) -> bool:
        """Whether the threads are those of this process: a fork has none."""
        return self._process == os.getpid()

    def put(self, index: int, task: Task) -> None:
        """Give partition `index` a task."""
        self._queues[index].put(task)


def _work(
    queue: "SimpleQueue[Task | None]", receiver: Receiver, num_threads: int | None, started: threading.Barrier
) -> None:
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    started.wait()
    del started
    with receiver.computing():
        while (task := queue.get()) is not None:
            task()
            del task


def _stop(queues: "Sequence[SimpleQueue[Task | None]]", threads: Sequence[threading.Thread]) -> None:
    """End the threads. A thread that still runs when the interpreter ends would abort the process."""
    for queue in queues:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=5.0)
