"""`Members`: the processes of a run, or threads that act as processes, and small exchanges between all of them.

ProcessMembers    the processes of a torch.distributed process group
ThreadMembers     threads of this process, see `pipeloom.transport.thread_members`
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pipeloom.processes.collectives import all_gather_bytes, all_gather_numbers, all_reduce, cpu_group, destroy_groups

_LOST = "another process ended, or timed out, during a collective"


class Members(ABC):
    """All members of a run. They make the same calls in the same order.

    Attributes:
        rank: of this member.
        size: number of members.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, payload: bytes, *, lost: str = _LOST, timeout_seconds: float | None = None) -> list[bytes]:
        """Every member's bytes, in order of rank.

        Raises:
            PeerLost: a member ended or timed out; the message is `lost`.
        """

    @abstractmethod
    def gather_numbers(self, numbers: Sequence[int], timeout_seconds: float) -> list[list[int]]:
        """Every member's numbers, as many from each, in order of rank.

        Raises:
            PeerLost: a member ended or timed out.
        """

    @abstractmethod
    def sum(self, values: Tensor, timeout_seconds: float) -> Tensor:
        """The sum of a small CPU tensor over the members, in place: the same bits on every member.

        Raises:
            PeerLost: a member ended or timed out.
        """

    @abstractmethod
    def close(self) -> None:
        """Destroy what was made for these exchanges."""


class ProcessMembers(Members):
    """The processes of the default process group of torch.distributed.

    Attributes:
        group: gloo group of all processes.
    """

    def __init__(self) -> None:
        self.group, self._made = cpu_group()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, payload: bytes, *, lost: str = _LOST, timeout_seconds: float | None = None) -> list[bytes]:
        return all_gather_bytes(payload, self.group, lost=lost, timeout_seconds=timeout_seconds)

    def gather_numbers(self, numbers: Sequence[int], timeout_seconds: float) -> list[list[int]]:
        return all_gather_numbers(numbers, self.group, timeout_seconds)

    def sum(self, values: Tensor, timeout_seconds: float) -> Tensor:
        return all_reduce(values, self.group, timeout_seconds)

    def close(self) -> None:
        destroy_groups(self._made)
        self._made = ()


class _Thread(threading.local):
    members: Members | None = None


_thread = _Thread()


def act_as(members: Members | None) -> None:
    """From now on this thread is one of `members`; None: it is the process again."""
    _thread.members = members


def thread_members() -> Members | None:
    """The members to which this thread belongs; None: it is no member of its own."""
    return _thread.members


def current_members() -> Members | None:
    """The members of the run as this thread sees them; None: there is no process group."""
    if _thread.members is not None:
        return _thread.members
    return ProcessMembers() if dist.is_available() and dist.is_initialized() else None
