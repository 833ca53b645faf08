"""Streams, marks, times and memory of the device where a rank computes, behind one interface.

device.py   `Device`: what everything else asks of a device
host.py     `HostDevice`: the CPU, whose operations end before their calls return
cuda.py     `CudaDevice`: one CUDA device; the only file that makes streams and events
"""

from functools import lru_cache

import torch

from pipeloom.devices.device import Device, Mark, Stamp
from pipeloom.devices.host import HostDevice

__all__ = ["Device", "HostDevice", "Mark", "Stamp", "device_of"]


@lru_cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device; the same object for all who ask in this process."""
    if device.type != "cuda":
        return HostDevice(device)
    from pipeloom.devices.cuda import CudaDevice  # here: a machine without CUDA never needs it

    return CudaDevice(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))
