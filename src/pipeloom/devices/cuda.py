"""`CudaDevice`: streams, events and the allocator of one CUDA device."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeloom.devices.device import Device, Mark, Stamp, Stream
from pipeloom.devices.graphs import CudaGraphs, Graphs

_ORIGIN_SECONDS = 600.0  # times between events are milliseconds in 32 bits: after an hour they lose their microseconds


class CudaDevice(Device):
    """One CUDA device.

    Args:
        device: with its index.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[Any, torch.cuda.Stream] = {}
        self._origin = self._now()

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)

    def used_here(self, tensor: Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.device))

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream(stream, threading.get_ident()))

    def is_in(self, stream: Stream) -> bool:
        current = torch.cuda.current_stream(self.device)
        return any(kind is stream and made == current for (kind, *_), made in [*self._streams.items()])

    @contextmanager
    def computing(self, after: Mark = None) -> Iterator[None]:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream("compute", threading.get_ident())):
            self.wait(after)
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def receive(self, tensor: Tensor, ready: Mark) -> Tensor:
        source = tensor.device
        if source == self.device:
            if ready is not None:
                self.wait(ready)
                self.used_here(tensor)
            return tensor
        # A copy between devices runs in a stream of its own on both: computations of either go on beside it.
        with torch.cuda.stream(self._stream(source, source)) if source.type == "cuda" else self.on(Stream.INCOMING):
            if source.type == "cuda":
                if ready is not None:
                    torch.cuda.current_stream(source).wait_event(ready)
                tensor.record_stream(torch.cuda.current_stream(source))
            with self.on(Stream.INCOMING):
                moved = tensor.to(self.device, non_blocking=source.type == "cuda" or tensor.is_pinned())
                copied = self.mark()
        self.wait(copied)
        self.used_here(moved)
        return moved

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # A copy from pageable memory has read it when the call returns. One from pinned memory has not: the host waits
        # for it, in a stream where it does not wait for computations.
        if not any(tensor.is_pinned() for tensor in tensors if not tensor.is_cuda):
            return [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        with self.on(Stream.INCOMING):
            found = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            copied = self.mark()
        copied.synchronize()
        self.wait(copied)
        for tensor in found:
            self.used_here(tensor)
        return found

    def stamp(self) -> Stamp:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        events = [stamp for stamp in stamps if stamp != 0.0]
        if not events:
            return [0.0] * len(stamps)
        torch.cuda.synchronize(self.device)
        event, moment = self._origin
        found = [0.0 if stamp == 0.0 else moment + event.elapsed_time(stamp) / 1000 for stamp in stamps]
        if perf_counter() - moment > _ORIGIN_SECONDS:
            self._origin = self._now()
        return found

    def _now(self) -> tuple[torch.cuda.Event, float]:
        """An event that has just passed, and when that was."""
        torch.cuda.synchronize(self.device)
        event = self.stamp()
        event.synchronize()
        return event, perf_counter()

    def graphs(self) -> Graphs | None:
        return CudaGraphs(self.device)

    def _stream(self, *key: Any) -> torch.cuda.Stream:
        """The stream of this kind, made when it is first used."""
        if key not in self._streams:
            device = next((each for each in key if isinstance(each, torch.device)), self.device)
            # torch deals a few streams out in turn, also to others: those of a higher priority are not theirs.
            priority = -1 if key[0] is Stream.SECOND else 0
            self._streams[key] = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        return self._streams[key]
