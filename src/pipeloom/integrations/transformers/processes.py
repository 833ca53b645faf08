"""`Processes`: values of one process of a run on all of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError, RunError
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.members import ProcessMembers, current_members
from pipeloom.transport.values import Layout, decode, flatten, unflatten


class Processes:
    """All processes of the default process group, or this process alone. All of them make the same calls.

    Attributes:
        rank: of this process.
        size: number of processes.
        members: exchange small values; None: there is one process.

    Raises:
        InputError: called in a thread of `pipeloom.run_threads`.
    """

    def __init__(self) -> None:
        members = current_members()
        if members is not None and not isinstance(members, ProcessMembers):
            raise InputError("PipelineTrainer does not run in threads of run_threads. Start processes with torchrun.")
        self.members = members
        self.rank, self.size = (0, 1) if members is None else (members.rank, members.size)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of process `source`, on all: on others with its tensors on the CPU. Others pass anything.

        Raises:
            PeerLost: a process ended or timed out.
            InputError: the value holds something other than dense tensors, constants, tuples, lists and dicts.
        """
        if self.members is None or self.size == 1:
            return value
        if self.rank == source:
            layout, tensors = flatten(value, "process 0 sends" if source == 0 else "the last stage returned")
            header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
            self._send(torch.tensor([len(header)]), source)
            self._send(header, source)
            payload = torch.empty(layout.num_bytes, dtype=torch.uint8)
            for tensor, (start, end) in zip(tensors, _places(layout), strict=True):
                payload[start:end] = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._send(payload, source)
            return value
        length = int(self._send(torch.zeros(1, dtype=torch.int64), source))
        header = self._send(torch.empty(length, dtype=torch.uint8), source)
        layout = decode(header.numpy().tobytes())
        payload = self._send(torch.empty(layout.num_bytes, dtype=torch.uint8), source)
        found = [
            payload[start:end].clone().view(dtype).reshape(shape)
            for (shape, dtype, _), (start, end) in zip(layout.specs, _places(layout), strict=True)
        ]
        return unflatten(layout, found)

    def _send(self, values: Tensor, source: int) -> Tensor:
        """The tensor of process `source`, in place."""
        assert self.members is not None
        if values.numel():
            with noticing_lost_peers():
                dist.broadcast(values, source, group=self.members.group)
        return values

    def first_makes(self, make: Callable[[], Any]) -> Any:
        """What `make` returns in process 0, on all. Its error there raises on all.

        Raises:
            RunError: `make` raised in process 0, and this is another process.
        """
        if self.size == 1:
            return make()
        made, failure = None, None
        if self.rank == 0:
            try:
                made = (True, make())
                flatten(made, "process 0 loaded")
            except Exception as error:  # the other processes must not wait for this one
                made, failure = (False, f"{type(error).__name__}: {error}"), error
        succeeded, value = self.broadcast(made)
        if failure is not None:
            raise failure
        if not succeeded:
            raise RunError(f"process 0 failed: {value}")
        return value


def _places(layout: Layout) -> list[tuple[int, int]]:
    """Where each tensor's bytes start and end."""
    sizes = [shape.numel() * dtype.itemsize for shape, dtype, _ in layout.specs]
    return [(start, start + size) for start, size in zip(layout.offsets, sizes, strict=True)]
