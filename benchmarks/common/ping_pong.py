"""What a message takes by itself, without any pipeline around it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks.common.workloads import wait
from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.transport import Channel, Lane
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.values import flatten


def ping_pong(rank: int, num_ranks: int, count: int, wait_seconds: float) -> tuple[list[float], list[float]]:
    """Ranks 0 and 1, 2 and 3, ... send each other messages in turn, all pairs at once; `one_way_seconds` reads it.

    Each side waits before it answers, as a stage does before its result goes out: then caches are as cold, and as many
    ranks wake up at a time.

    Args:
        rank: of this process.
        num_ranks: an even number of processes on one machine, all of which call this.
        count: messages of each rank.
        wait_seconds: before each of them.

    Returns:
        When each message of this rank was sent, and when each to this rank had been received; one clock for all ranks.
    """
    transport = SharedMemoryTransport(rank, all_gather_bytes)
    peer = rank ^ 1
    transport.open([Channel(source, source ^ 1, Lane.PIPELINE) for source in range(num_ranks)])
    outgoing = transport.outgoing(Channel(rank, peer, Lane.PIPELINE))
    incoming = transport.incoming(Channel(peer, rank, Lane.PIPELINE))
    layout, tensors = flatten(torch.zeros(1, 4))
    sent, received = [], []
    for turn in range(2 * count):
        if turn % 2 == rank % 2:
            wait(wait_seconds)
            sent.append(time.monotonic())
            outgoing.send(layout, tensors)
        else:
            incoming.receive()
            received.append(time.monotonic())
    transport.close()
    return sent, received


def one_way_seconds(times: Sequence[tuple[list[float], list[float]]]) -> list[float]:
    """From just before a send to the end of the receive that waited for it, for each message of `ping_pong`.

    Args:
        times: by rank.
    """
    return [
        end - start
        for rank, (_, received) in enumerate(times)
        for start, end in zip(times[rank ^ 1][0], received, strict=True)
    ]
