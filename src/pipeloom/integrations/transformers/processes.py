"""`Processes`: values of one process of a run on all of them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError, RunError
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.members import ProcessMembers, current_members


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
        """
        if self.members is None or self.size == 1:
            return value
        held = [on_cpu(value) if self.rank == source else None]
        with noticing_lost_peers():
            dist.broadcast_object_list(held, src=source, group=self.members.group)
        return value if self.rank == source else held[0]

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
            except Exception as error:  # the other processes must not wait for this one
                made, failure = (False, f"{type(error).__name__}: {error}"), error
        succeeded, value = self.broadcast(made)
        if failure is not None:
            raise failure
        if not succeeded:
            raise RunError(f"process 0 could not load its batch: {value}")
        return value

    def barrier(self) -> None:
        """Wait for all processes."""
        self.broadcast(None)


def on_cpu(value: Any) -> Any:
    """A value with its tensors on the CPU, without graphs."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(on_cpu(each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(on_cpu, value))
    return value
