"""`Communicators`: NCCL communicators are made when their process group is, and their number and memory are known.

torch makes the communicator of a group in its first collective or message. That is in the middle of the first step,
which then takes long, and takes memory that torch's allocator does not know. `Communicators.connect` makes it in the
set-up.

Ranks do not wait in a circle. All processes run the same set-up, which makes one sequence of groups: channels in sorted
order and replica after replica, axes and links in the order of the program, and where pairs overlap a second group of
each axis. A process connects the groups that it is a member of in the order of this sequence, and `connect` waits for
members of that group alone. Of the groups that are not connected, consider the first one. Each member has connected its
earlier groups, so it waits for no other group and arrives at this one, which connects. The same holds for the next one,
until all are connected. Where a group has gloo too, gloo has connected the same members in the same order just before.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.devices.device import Device


class Communicators:
    """The communicators that `connect` has made in this process. A communicator counts until its group is gone."""

    def __init__(self) -> None:
        self._bytes: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()

    @property
    def number(self) -> int:
        """Number of communicators."""
        return len(self._bytes)

    @property
    def num_bytes(self) -> int:
        """Device memory that they took when they were made, outside torch's allocator."""
        return sum(self._bytes.values())

    def connect(self, group: dist.ProcessGroup, device: Device, first: Callable[[Tensor], object]) -> None:
        """Make the communicator of a group, unless it is made already. All members call it, in the order above.

        Args:
            group: with NCCL for CUDA tensors.
            device: of this process.
            first: exchanges a tensor of one element between the members. NCCL connects members, and allocates buffers
                for it, when they first exchange something.

        Raises:
            RuntimeError: of torch, such as torch.distributed.DistBackendError where a member ended.
        """
        if group in self._bytes:
            return
        element = torch.zeros(1, device=device.device)  # allocated before memory is compared
        device.synchronize()
        before = device.free_bytes()
        # From then on messages use this communicator too: without it, torch makes another one per pair of ranks.
        group._get_backend(device.device).eager_connect_single_device(device.device)
        first(element)
        device.synchronize()
        self._bytes[group] = max(0, before - device.free_bytes())


COMMUNICATORS = Communicators()


@contextmanager
def without_splits() -> Iterator[None]:
    """Groups that are made in the block get communicators of their own, which only their members make.

    After ``init_process_group(device_id=...)`` torch splits them from the communicator of the default group. All
    processes take part in a split. Those that are not in a group of gloo start one too and wait for its members, which
    do not; so do members of a group that they make alone.
    """
    whole = dist.group.WORLD
    assert whole is not None
    bound, whole.bound_device_id = whole.bound_device_id, None
    try:
        yield
    finally:
        whole.bound_device_id = bound
