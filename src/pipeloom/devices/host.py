"""`HostDevice`: the CPU. Its operations end before their calls return, so there is nothing to order."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from pipeloom.devices.device import Device, Mark, Stamp, Stream
from pipeloom.devices.graphs import Graphs


class HostDevice(Device):
    """The CPU, or another device that torch orders by itself."""

    is_asynchronous = False
    stamp = staticmethod(perf_counter)

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")

    def mark(self) -> Mark:
        return None

    def wait(self, mark: Mark) -> None:
        """Nothing to wait for."""

    def used_here(self, tensor: Tensor) -> None:
        """Memory is free when its last tensor is."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def is_in(self, stream: Stream) -> bool:
        return False

    def computing(self, after: Mark = None) -> AbstractContextManager[Any]:
        return nullcontext()

    def synchronize(self) -> None:
        """All operations have ended."""

    def free_bytes(self) -> int:
        return 0

    def receive(self, tensor: Tensor, ready: Mark) -> Tensor:
        if ready is not None:  # of a device whose kernels may still run: the copy waits for them
            ready.synchronize()
        return tensor.to(self.device)

    def upload(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.to(self.device) for tensor in tensors]

    def seconds(self, stamps: Sequence[Stamp]) -> list[float]:
        return list(stamps)

    def graphs(self) -> Graphs | None:
        return None
