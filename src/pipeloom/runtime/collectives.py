"""The few collectives a pipeline needs beside its messages, over a CPU process group and without pickling."""

from __future__ import annotations

import torch
import torch.distributed as dist


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's bytes, in order of rank, on every rank."""
    size = dist.get_world_size(group)
    length = torch.tensor([len(payload)])
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    longest = max(1, int(max(lengths)))
    padded = torch.zeros(longest, dtype=torch.uint8)
    if payload:
        padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [row[: int(n)].numpy().tobytes() for row, n in zip(gathered, lengths, strict=True)]
