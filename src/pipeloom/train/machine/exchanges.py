"""Times of messages and collectives between the processes of a group.

Each is a lower quartile, and at most that of a larger message: background load only ever makes one longer.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from statistics import quantiles

import torch
import torch.distributed as dist

from pipeloom.processes.collectives import all_gather_bytes
from pipeloom.transport.interface import Channel, Lane
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.values import flatten

_REPEATS = 15
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of newer and older torch


def measure_messages(rank: int, size: int, lengths: Sequence[int]) -> tuple[list[tuple[float, float]], float, float]:
    """Curve of one-way seconds by bytes, and the seconds that a small message keeps its sender and its receiver busy.

    Ranks 0 and 1, 2 and 3, ... send messages to and fro, over the transport of pipelines on one machine. With an odd
    number, the last one only waits.
    """
    transport = SharedMemoryTransport(rank, all_gather_bytes)
    even = size - size % 2
    peer = rank ^ 1
    transport.open([Channel(each, each ^ 1, Lane.PIPELINE) for each in range(even)])
    curve, busy = list[tuple[float, float]](), (0.0, 0.0)
    if rank < even:
        outgoing = transport.outgoing(Channel(rank, peer, Lane.PIPELINE))
        incoming = transport.incoming(Channel(peer, rank, Lane.PIPELINE))
        for length in lengths:
            layout, tensors = flatten(torch.zeros(max(1, length // 4)))
            trips, sends = [], []
            for _ in range(2 + _REPEATS):
                start = time.perf_counter()
                if rank % 2 == 0:
                    outgoing.send(layout, tensors)
                    sends.append(time.perf_counter() - start)
                    incoming.receive()
                else:
                    incoming.receive()
                    begin = time.perf_counter()
                    outgoing.send(layout, tensors)
                    sends.append(time.perf_counter() - begin)
                trips.append(time.perf_counter() - start)
            curve.append((4.0 * max(1, length // 4), _lower(trips[2:]) / 2))
            if length == lengths[0]:
                busy = _lower(sends[2:]), _receiving(rank, outgoing, incoming, layout, tensors)
    dist.barrier()
    transport.close()
    return _ascending(curve), *busy


def _receiving(rank: int, outgoing: object, incoming: object, layout: object, tensors: object) -> float:
    """Seconds of a receive whose message is there already."""
    for _ in range(_REPEATS):
        outgoing.send(layout, tensors)  # type: ignore[attr-defined]
    time.sleep(0.01)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        incoming.receive()  # type: ignore[attr-defined]
        times.append(time.perf_counter() - start)
    return _lower(times)


def measure_collectives(size: int, lengths: Sequence[int]) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Curves of all-reduces and all-gathers of float32 between all processes, by bytes of the full tensor.

    And the cores that this process uses during the largest ones.
    """
    found: dict[str, list[tuple[float, float]]] = {"all_reduce": [], "all_gather": []}
    used = [0.0]
    for length in lengths:
        part = max(1, length // 4 // size)
        full, own = torch.zeros(part * size), torch.zeros(part)
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, full),
            "all_gather": partial(_ALL_GATHER, full, own),
        }
        for name, call in calls.items():
            times = []
            dist.barrier()
            begun, before = time.perf_counter(), time.process_time()
            for _ in range(1 + _REPEATS):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            found[name].append((float(full.nbytes), _lower(times[1:])))
            if length == lengths[-1]:
                used.append((time.process_time() - before) / (time.perf_counter() - begun))
    return {name: _ascending(curve) for name, curve in found.items()}, max(used)


def _lower(times: Sequence[float]) -> float:
    return quantiles(times)[0]


def _ascending(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The curve with no entry above a later one."""
    least = list(accumulate((seconds for _, seconds in reversed(curve)), min))
    return [(size, seconds) for (size, _), seconds in zip(curve, reversed(least), strict=True)]
