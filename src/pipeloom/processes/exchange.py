"""The all-gather of small payloads that the ranks of a save need. Nothing is pickled."""

import torch
import torch.distributed as dist

from pipeloom.processes.collectives import all_gather_bytes, let_gloo_finish


class Exchange:
    """The ranks that save one checkpoint together; here a single process, also one that runs all pipeline ranks."""

    rank = 0
    size = 1

    def all_gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all ranks, by rank. Blocks until all ranks have called it."""
        return [payload]


class DistributedExchange(Exchange):
    """The exchange of the processes of a torch.distributed group.

    Args:
        group: the process group; defaults to all processes.
        device: the device of the group's backend: CPU for gloo, the CUDA device of the rank for NCCL.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        let_gloo_finish()
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return all_gather_bytes(payload, self._group, self._device)
