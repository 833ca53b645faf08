"""The processes of a run, and the few words they exchange beside the pipeline's own messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.runtime.collectives import all_gather_bytes
from pipeloom.runtime.launcher import Membership


class Group:
    """All processes of a run, or this process alone. An `Exchange` of checkpoints.

    Attributes:
        rank, size: of this process among the processes.
        device: where this process computes.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every process's payload, by rank."""
        if self.size == 1:
            return [payload]
        with _noticing_lost_peers():
            return all_gather_bytes(payload)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, in place and on the CPU; in the order of ranks, so it repeats to the last bit."""
        if self.size > 1:
            with _noticing_lost_peers():
                dist.all_reduce(values)
        return values

    def from_rank(self, source: int, values: Tensor) -> Tensor:
        """`values` of process `source`, in place, on every process."""
        if self.size > 1:
            with _noticing_lost_peers():
                dist.broadcast(values, source)
        return values


@contextmanager
def meet(member: Membership | None) -> Iterator[Group]:
    """Meet the other processes: the process group is there inside the block and gone after it."""
    local_rank = member.local_rank if member else 0
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if member is None:
        yield Group(0, 1, device)
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=member.meeting, rank=member.rank, world_size=member.world_size)
    yield Group(member.rank, member.world_size, device)
    dist.destroy_process_group()  # not after an error: others may be gone


@contextmanager
def _noticing_lost_peers() -> Iterator[None]:
    """gloo raises a plain RuntimeError when a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"another rank went away during a collective ({str(error).splitlines()[0]})") from error
