"""The few collectives a pipeline needs beside its messages, over a CPU process group and without pickling."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLost


def all_reduce(values: Tensor, group: dist.ProcessGroup, timeout_seconds: float) -> Tensor:
    """The sum over a CPU group's processes, in place.

    Raises:
        PeerLost: one of them went away, or did not come in time.
    """
    try:
        dist.all_reduce(values, group=group, async_op=True).wait(timedelta(seconds=timeout_seconds))
    except RuntimeError as error:
        raise PeerLost(f"another process went away during a collective ({str(error).splitlines()[0]})") from error
    return values


def all_gather_bytes(
    payload: bytes, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> list[bytes]:
    """Every rank's bytes, in order of rank, on every rank.

    Two all-gathers: the lengths, then the bytes padded to the longest. `device` is where the group's backend wants its
    tensors.
    """
    length = torch.tensor([len(payload)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(size) for size in lengths]
    padded = torch.zeros(max(1, *sizes), dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    padded = padded.to(device)
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [row[:size].cpu().numpy().tobytes() for row, size in zip(gathered, sizes, strict=True)]
