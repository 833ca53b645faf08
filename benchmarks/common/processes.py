"""Crews: groups of long-lived processes that sleep while others are measured.

A crew builds one subject per process and then obeys method calls sent by the parent. Between calls every process
sleeps in a read from its pipe, so crews can take turns on the same cores, round after round. Everything has a timeout;
a process also ends when its parent ends, even where it hangs in a collective.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29


def run_first(thread: int = 0) -> bool:
    """Let a thread run as soon as it is due, whatever else the machine does; False where that is not allowed.

    For those that wait, and so leave the cores to others nearly all of the time.
    """
    try:
        os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
    except OSError:
        return False
    return True


@contextmanager
def running_first() -> Iterator[None]:
    """`run_first` for the calling thread, within this."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    allowed = run_first()
    try:
        yield
    finally:
        if allowed:
            os.sched_setscheduler(0, *before)


class CrewError(RuntimeError):
    """A process of a crew raised, died or did not answer in time.

    Attributes:
        reason: in one line.
        raised: whether it raised; else it may have been slow, or killed.
    """

    def __init__(self, text: str, reason: str, *, raised: bool) -> None:
        super().__init__(text)
        self.reason, self.raised = reason, raised


class Crew:
    """`world_size` processes, each with ``subject(rank, *arguments)``.

    The processes start at once and in parallel with those of other crews; the first `call` waits for them.

    Args:
        name: for messages.
        world_size: number of processes.
        subject: a picklable function or class of the objects that answer calls; its `close`, if any, is called last.
        arguments: picklable.
        num_threads: threads of torch in each process.
        process_group: whether to form a gloo process group of the crew first.
        timeout_seconds: for every answer.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        subject: Callable[..., Any],
        *arguments: Any,
        num_threads: int = 1,
        process_group: bool = True,
        timeout_seconds: float = 300.0,
    ) -> None:
        self.name = name
        self.world_size = world_size
        self._timeout_seconds = timeout_seconds
        _leave_by_exception()
        self._scratch = tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-")
        self._failed = False
        self._pending_start = True
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            settings = (rank, world_size, self._scratch.name, num_threads, process_group, timeout_seconds)
            process = context.Process(target=_serve, args=(theirs, settings, subject, arguments), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(mine)
            self._processes.append(process)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """``subject.method(*arguments)`` on all ranks at once; the answers, by rank.

        Raises:
            CrewError: with the traceback of the rank that failed.
        """
        if self._pending_start:
            self._pending_start = False
            self._collect("start")
        for connection in self._connections:
            connection.send((method, arguments))
        return self._collect(method)

    def _collect(self, method: str) -> list[Any]:
        answers: list[Any] = [None] * self.world_size
        deadline = time.monotonic() + self._timeout_seconds
        waiting = set(range(self.world_size))
        while waiting:
            connections = {self._connections[rank]: rank for rank in waiting}
            ready = multiprocessing.connection.wait(list(connections), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"ranks {sorted(waiting)} did not answer {method!r} in {self._timeout_seconds:g} s")
            for connection in ready:
                rank = connections[connection]  # type: ignore[index]
                try:
                    ok, answers[rank] = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._fail(f"rank {rank} died in {method!r}")
                if not ok:
                    last = str(answers[rank]).strip().splitlines()[-1]
                    self._fail(f"rank {rank} failed in {method!r}:\n{answers[rank]}", f"{method}: {last}")
                waiting.discard(rank)
        return answers

    def _fail(self, what: str, error: str | None = None) -> None:
        self._failed = True
        logs = "".join(
            f"--- output of rank {rank}\n{log.read_text(errors='replace')[-2000:]}\n"
            for rank in range(self.world_size)
            if (log := Path(self._scratch.name) / f"rank{rank}.log").exists()
        )
        raise CrewError(f"{self.name}: {what}\n{logs}", error or what, raised=error is not None)

    def close(self) -> None:
        """End all processes: asked first, killed after 20 s or at once after a failure."""
        for connection in self._connections:
            with suppress(OSError):
                if not self._failed:
                    connection.send(None)
                connection.close()
        deadline = time.monotonic() + (0.0 if self._failed else 20.0)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._scratch.cleanup()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = self._failed or error is not None
        self.close()


def _leave_by_exception() -> None:
    """A benchmark that is told to end leaves its blocks, which delete their directories and end their processes."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def _serve(
    connection: Connection,
    settings: tuple[int, int, str, int, bool, float],
    subject: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """The life of one process."""
    rank, world_size, scratch, num_threads, process_group, timeout_seconds = settings
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds: emulated stages wait with time.sleep, which is late by the slack
    log = os.open(f"{scratch}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    instance: Any = None
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(num_threads)
        if process_group:
            store = dist.FileStore(f"{scratch}/store", world_size)
            timeout = timedelta(seconds=timeout_seconds)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        instance = subject(rank, *arguments)
        connection.send((True, None))
        while (request := connection.recv()) is not None:
            method, parameters = request
            connection.send((True, getattr(instance, method)(*parameters)))
        if hasattr(instance, "close"):
            instance.close()
        if process_group:
            dist.destroy_process_group()
    except EOFError:  # the parent is gone
        os._exit(1)
    except BaseException:
        with suppress(OSError):
            connection.send((False, traceback.format_exc()))
        os._exit(1)
