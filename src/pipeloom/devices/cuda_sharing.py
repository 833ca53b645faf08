"""`CudaMemorySharing`: memory and events of a CUDA device that processes of one machine share."""

import os
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from pipeloom.devices.cuda_driver import SharedAllocations
from pipeloom.devices.device import Device
from pipeloom.devices.sharing import MemorySharing, SharedEvent, SharedMemory
from pipeloom.errors import RunError

_NAME_BYTES = 64  # of cudaIpcEventHandle_t


class _CudaEvent(SharedEvent):
    def __init__(self, device: torch.device, name: bytes | None = None) -> None:
        self._device = device
        with torch.cuda.device(device):
            if name is None:
                self._event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
                self.name: bytes = self._event.ipc_handle()  # type: ignore[no-untyped-call]
            else:
                self.name = name
                self._event = torch.cuda.Event.from_ipc_handle(device, name)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def passed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaMemorySharing(MemorySharing):
    """Shared memory of one CUDA device.

    Args:
        find: returns the device; called when it is first used.
        index: of the device; None: not known yet. Then every process is expected to reach the memory of every other.
    """

    def __init__(self, find: Callable[[], Device], index: int | None) -> None:
        super().__init__()
        self._find, self._works = find, False
        self.identity, self.reach = ("", ("",)) if index is None else (_identity(index), _reach(index))

    @cached_property
    def device(self) -> Device:
        return self._find()

    @cached_property
    def _allocations(self) -> SharedAllocations:
        return SharedAllocations(self.device.device)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def make(self, num_bytes: int) -> tuple[SharedMemory, int, bytes]:
        content, descriptor = self._allocations.make(num_bytes)
        filled, taken = (_CudaEvent(self.device.device) for _ in range(2))
        return SharedMemory(content, filled, taken), descriptor, filled.name + taken.name

    def open(self, num_bytes: int, descriptor: int, names: bytes) -> SharedMemory:
        if len(names) != 2 * _NAME_BYTES:
            raise RunError(f"names of two CUDA events have {len(names)} bytes: must be {2 * _NAME_BYTES}.")
        device = self.device.device
        content = self._allocations.open(num_bytes, descriptor)
        return SharedMemory(content, _CudaEvent(device, names[:_NAME_BYTES]), _CudaEvent(device, names[_NAME_BYTES:]))

    def check(self) -> None:
        if not self._works:
            os.close(self.make(1)[1])
            self._works = True


def _identity(index: int) -> str:
    """The same in all processes, whatever CUDA_VISIBLE_DEVICES is there."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _reach(index: int) -> Sequence[str]:
    others = (other for other in range(torch.cuda.device_count()) if other != index)
    peers = [other for other in others if torch.cuda.can_device_access_peer(index, other)]
    return [_identity(index), *map(_identity, peers)]
