"""Runs the ranks of one process in one thread per rank."""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from pipeloom.common import random_states
from pipeloom.devices import Device, Mark
from pipeloom.errors import PeerLost
from pipeloom.transport.interface import OneProcessTransport


class RankThreads:
    """One thread per rank, which share the cores evenly. On a device each computes in a stream of its own.

    Args:
        devices: where each rank computes.
        transport: between them.
    """

    def __init__(self, devices: Mapping[int, Device], transport: OneProcessTransport) -> None:
        self._devices, self._transport = devices, transport
        cores = max(1, torch.get_num_threads() // len(devices))
        self._pool = ThreadPoolExecutor(len(devices), "rank", initializer=_begin_thread, initargs=(cores,))

    def run(self, runs: Mapping[int, Iterator[None]]) -> None:
        """Run all ranks to their ends; raises the error that came first.

        An interrupt of the caller, such as Ctrl-C, is raised once every rank has stopped, at its next wait.
        """
        # The caller's thread-local modes of torch: gradients on or off, autocast. Saved-tensor hooks are left out.
        cached = torch.is_autocast_cache_enabled()
        autocast = [
            functools.partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device), cache_enabled=cached)
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]
        gradients = functools.partial(torch.set_grad_enabled, torch.is_grad_enabled())
        modes: list[Callable[[], AbstractContextManager[Any]]] = [gradients, *autocast]
        futures: list[Future[None]] = []
        begin = threading.Event()
        before = {device: device.mark() for device in set(self._devices.values())}
        done: dict[int, Mark] = {}

        def drive(rank: int) -> None:
            begin.wait()
            if len(futures) < len(runs):  # the caller was interrupted before all were submitted
                return
            try:
                device = self._devices[rank]
                with ExitStack() as stack:
                    stack.enter_context(device.computing(before[device]))
                    for mode in modes:
                        stack.enter_context(mode())
                    for _ in runs[rank]:
                        pass
                    done[rank] = device.mark()
            except BaseException:
                self._transport.interrupt(rank)
                raise

        try:
            for rank in runs:
                futures.append(self._pool.submit(drive, rank))
            begin.set()
            errors = [error for error in (future.exception() for future in futures) if error is not None]
        except BaseException:
            for rank in runs:
                self._transport.interrupt(rank)
            begin.set()
            wait(futures)
            raise
        for rank, mark in done.items():
            self._devices[rank].wait(mark)
        if errors:  # the cause rather than a PeerLost that followed from it
            raise min(errors, key=lambda error: isinstance(error, PeerLost))

    def close(self) -> None:
        self._pool.shutdown()


def _begin_thread(num_cores: int) -> None:
    torch.set_num_threads(num_cores)
    random_states.thread.shares_process = True
