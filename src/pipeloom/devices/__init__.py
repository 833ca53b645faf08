"""Streams, marks, times, graphs and shared memory of the device where a rank computes, behind one interface.

device.py         `Device`: what everything else asks of a device
host.py           `HostDevice`: the CPU, whose operations end before their calls return
cuda.py           `CudaDevice`: one CUDA device; the only file that makes its streams
existing.py       `existing_device`: the device that a user names
sharing.py        `MemorySharing`: memory of a device that two processes map
cuda_sharing.py   `CudaMemorySharing`: that of a CUDA device; cuda_driver: memory with a file descriptor
communicators.py  `Communicators`: NCCL communicators that are made in the set-up, their number and memory
"""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import nn

from pipeloom.devices.device import Device, Mark, Stamp
from pipeloom.devices.host import HostDevice
from pipeloom.devices.sharing import MemorySharing
from pipeloom.errors import InputError

__all__ = ["Device", "HostDevice", "Mark", "Stamp", "device_of", "device_of_modules", "sharing_of"]


@lru_cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device; the same object for all who ask in this process."""
    if device.type != "cuda":
        return HostDevice(device)
    from pipeloom.devices.cuda import CudaDevice  # here: a machine without CUDA never needs it

    return CudaDevice(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


@lru_cache
def sharing_of(device: torch.device | None = None) -> MemorySharing:
    """What shares memory of a CUDA device with other processes; the same object for all who ask in this process.

    Args:
        device: with its index; None: the current device when the first tensor is sent or received.
    """
    from pipeloom.devices.cuda_sharing import CudaMemorySharing  # here: a machine without CUDA never needs it

    if device is not None:
        return CudaMemorySharing(lambda: device_of(device), device.index)
    return CudaMemorySharing(lambda: device_of(torch.device("cuda", torch.cuda.current_device())), None)


def device_of_modules(rank: int, stages: Mapping[int, nn.Module]) -> Device:
    """The device where a rank computes: that of its parameters and buffers, the CPU without any.

    Raises:
        InputError: its stages are on several devices.
    """
    found = {
        tensor.device: stage
        for stage, module in sorted(stages.items())
        for tensor in (*module.parameters(), *module.buffers())
        if tensor.device.type != "meta"
    }
    asynchronous = [device for device in found if device.type == "cuda"]
    if len(asynchronous) > 1:
        one, other = asynchronous[:2]
        raise InputError(
            f"rank {rank} has stage {found[one]} on {one} and stage {found[other]} on {other}: a rank computes on one "
            "device. Move all its stages there, or use a schedule with a rank for each device."
        )
    return device_of(asynchronous[0] if asynchronous else next(iter(found), torch.device("cpu")))
