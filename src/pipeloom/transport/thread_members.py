"""`run_threads`: runs a function in several threads that act as the processes of a run, for tests and notebooks.

Inside, ``pipeloom.Mesh`` and ``pipeloom.Pipeline`` work as under torchrun, with one thread per rank of the mesh.
Messages and collectives pass through queues.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from pipeloom.common import random_states
from pipeloom.errors import InputError, PeerLost
from pipeloom.processes.members import _LOST, Members, act_as
from pipeloom.transport.interface import Channel, Incoming, Outgoing, Transport
from pipeloom.transport.loopback import LoopbackTransport

T = TypeVar("T")


class _World:
    """What all threads share."""

    def __init__(self, size: int, timeout_seconds: float) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self.queues = LoopbackTransport(blocking=True, timeout_seconds=timeout_seconds)
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, object]] = {}
        self.lost: int | None = None

    def open(self, channels: list[Channel]) -> None:
        with self._changed:
            self.queues.open(channels)

    def exchange(self, number: int, rank: int, value: T, lost: str, timeout_seconds: float) -> list[T]:
        """Every thread's value of round `number`, in order of rank."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            values = self._rounds.setdefault(number, {})
            values[rank] = value
            if len(values) == self.size:
                self._changed.notify_all()
            while len(values) < self.size:
                if self.lost is not None or not self._changed.wait(deadline - time.monotonic()):
                    raise PeerLost(lost if self.lost is None else f"{lost} (rank {self.lost} stopped)")
            self._rounds.pop(number - 1, None)  # all threads have read it
            return [values[other] for other in range(self.size)]  # type: ignore[misc]

    def fail(self, rank: int) -> None:
        """Wake all threads that wait: `rank` will not answer."""
        with self._changed:
            if self.lost is None:
                self.lost = rank
            self._changed.notify_all()
            for source in range(self.size):
                self.queues.interrupt(source)


class ThreadMembers(Members):
    """One of the threads of `run_threads`."""

    def __init__(self, world: _World, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world, self._round = world, 0

    def gather(self, payload: bytes, *, lost: str = _LOST, timeout_seconds: float | None = None) -> list[bytes]:
        return self._exchange(payload, lost, timeout_seconds)

    def gather_numbers(self, numbers: Sequence[int], timeout_seconds: float) -> list[list[int]]:
        return self._exchange([*numbers], _LOST, timeout_seconds)

    def sum(self, values: Tensor, timeout_seconds: float) -> Tensor:
        total, *others = self._exchange(values.clone(), _LOST, timeout_seconds)
        for other in others:
            total = total + other
        return values.copy_(total)

    def _exchange(self, value: T, lost: str, timeout_seconds: float | None) -> list[T]:
        self._round += 1
        seconds = self._world.timeout_seconds if timeout_seconds is None else timeout_seconds
        return self._world.exchange(self._round, self.rank, value, lost, seconds)

    def close(self) -> None:
        """The queues end with the threads."""

    def transport(self, line: tuple[int, ...] | None = None) -> Transport:
        """Queues to the other threads.

        Args:
            line: the threads that the transport connects, whose ranks there are their places in `line`. None: all.
        """
        return ThreadTransport(self._world, line or tuple(range(self.size)))


class ThreadTransport(Transport):
    """Channels between the threads of `line`, by their place there. The tensors of a message are not copied."""

    def __init__(self, world: _World, line: tuple[int, ...]) -> None:
        self._world, self._line = world, line

    def _channel(self, channel: Channel) -> Channel:
        return channel._replace(source=self._line[channel.source], target=self._line[channel.target])

    def open(self, channels: Iterable[Channel]) -> None:
        self._world.open([self._channel(channel) for channel in channels])

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._world.queues.outgoing(self._channel(channel))

    def incoming(self, channel: Channel) -> Incoming:
        return self._world.queues.incoming(self._channel(channel))

    def end_step(self) -> None:
        """Queues hold nothing once their messages are taken."""

    def close(self) -> None:
        """The queues end with the threads."""


def run_threads(size: int, function: Callable[[], T], *, timeout_seconds: float = 1800.0) -> list[T]:
    """Call `function` in `size` threads that act as the processes of a run.

    Args:
        size: number of threads, the number of processes of the mesh that `function` makes.
        function: called once per thread. It makes its own mesh, model and pipeline, as a script under torchrun does.
        timeout_seconds: how long a thread waits for another.

    Returns:
        What each thread returned, in order of rank.

    Raises:
        InputError: `size` is below 1. Else the error of the thread that failed first.
    """
    if size < 1:
        raise InputError(f"size={size}: must be at least 1.")
    world = _World(size, timeout_seconds)
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    gradients = torch.is_grad_enabled()
    ended: list[int] = []
    news: SimpleQueue[None] = SimpleQueue()  # of `ended`
    begin = threading.Event()  # set once all threads have started: an interrupt before ends them without a call

    def work(rank: int) -> None:
        begin.wait()
        if interrupted:
            return
        act_as(ThreadMembers(world, rank))
        random_states.thread.shares_process = True
        try:
            with torch.set_grad_enabled(gradients):
                results[rank] = function()
        except BaseException as error:  # handed to the caller
            errors.append(error)
            world.fail(rank)
        finally:
            ended.append(rank)
            news.put(None)

    def wait_for_all() -> None:
        """In place of Thread.join: an interrupt inside it makes Python 3.11 take the thread for ended.

        Not in one long wait: Python misses a signal that arrives just before a thread begins to wait for a lock.
        """
        while len(ended) < size:
            with suppress(Empty):
                news.get(timeout=0.2)

    threads = [threading.Thread(target=work, args=(rank,), name=f"pipeloom-rank-{rank}") for rank in range(size)]
    interrupted = False
    try:
        for thread in threads:
            thread.start()
        begin.set()
        wait_for_all()
    except BaseException:  # an interrupt: threads stop where they next wait for each other
        interrupted = not begin.is_set()
        world.fail(0)
        begin.set()
        if not interrupted:
            wait_for_all()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]
