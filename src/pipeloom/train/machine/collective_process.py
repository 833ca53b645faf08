"""One process of a measurement: ``python -m pipeloom.train.machine.collective_process FILE BYTES NAMES``.

Every step of a drawn algorithm is an isend and an irecv of torch.distributed, over gloo. Its result is compared with a
replay before it is timed. Beside it, torch.distributed's own collective.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.cores import usable_cores
from pipeloom.errors import RunError
from pipeloom.plan.collectives.algorithms import ALGORITHMS, Algorithm
from pipeloom.plan.collectives.sends import Step, held_before, held_behind, replay
from pipeloom.processes import launcher, rendezvous
from pipeloom.processes.collectives import all_gather_bytes

_SECONDS = 0.2  # that the runs of one algorithm take, about
_MOST_RUNS = 15
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # of newer and older torch


def run_steps(steps: Sequence[Step], rank: int, held: dict[int, Tensor], length: int) -> None:
    """Run a collective as this rank.

    Args:
        steps: the same on all ranks.
        rank: of this process.
        held: the tensor of each chunk of this rank, before and behind.
        length: elements of a chunk.
    """
    for step in steps:
        work: list[Any] = []
        arriving = next((send for send in step if send.target == rank), None)
        leaving = next((send for send in step if send.source == rank), None)
        if arriving is not None:
            buffer = torch.empty(len(arriving.chunks) * length)
            work.append(dist.irecv(buffer, arriving.source))
        if leaving is not None:
            parts = [held[chunk] for chunk in leaving.chunks]
            message = parts[0] if len(parts) == 1 else torch.cat(parts)  # alive until it was sent
            work.append(dist.isend(message, leaving.target))
        for each in work:
            each.wait()
        if arriving is not None:
            for chunk, part in zip(arriving.chunks, torch.split(buffer, length), strict=True):
                if arriving.adds:
                    held[chunk] += part
                else:
                    held[chunk] = part


def _value(rank: int, chunk: int) -> int:
    """A small number, so that float32 sums are exact."""
    return 1 + (rank + 3 * chunk) % 7


def _seconds(call: Callable[[], object]) -> float:
    """The median of several runs, of the slowest process; the first run is not counted."""

    def timed() -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    timed()
    longest = torch.tensor([timed()])
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    runs = max(3, min(_MOST_RUNS, int(_SECONDS / max(1e-6, longest.item()))))
    found = median(timed() for _ in range(runs))
    return max(float(each) for each in all_gather_bytes(json.dumps(found).encode()))


def _timed(algorithm: Algorithm, rank: int, size: int, num_bytes: int) -> float:
    """Seconds of the drawn algorithm.

    Raises:
        RunError: it gives another result than its replay.
    """
    collective, chunks, steps = algorithm.collective, algorithm.chunks(size), algorithm.steps(size)
    length = max(1, int(num_bytes * algorithm.chunk_part(size)) // 4)
    before = held_before(collective, size, chunks)
    held = {chunk: torch.full((length,), float(_value(rank, chunk))) for chunk in before[rank]}
    run_steps(steps, rank, held, length)
    *_, expected = replay(steps, [{chunk: _value(r, chunk) for chunk in mine} for r, mine in enumerate(before)])
    for chunk in held_behind(collective, size, chunks)[rank]:
        if not bool((held[chunk] == expected[rank][chunk]).all()):
            raise RunError(
                f"{collective}, {algorithm.name}: rank {rank} has another chunk {chunk} than the replay of the sends. "
                "Run `pipeloom doctor`."
            )
    fresh = {chunk: torch.ones(length) for chunk in before[rank]}
    return _seconds(lambda: run_steps(steps, rank, dict(fresh), length))


def _library(collective: str, rank: int, size: int, num_bytes: int) -> Callable[[], object]:
    """torch.distributed's own collective on as many bytes."""
    part = max(1, num_bytes // 4 // size)
    full, own = torch.ones(part * size), torch.ones(part)
    parts = list(torch.split(full, part)) if rank == 0 else None
    calls: dict[str, Callable[[], object]] = {
        "broadcast": partial(dist.broadcast, full, 0),
        "reduce": partial(dist.reduce, full, 0),
        "all-reduce": partial(dist.all_reduce, full),
        "gather": partial(dist.gather, own, parts, 0),
        "all-gather": partial(_ALL_GATHER, full, own),
        "scatter": partial(dist.scatter, own, parts, 0),
        "reduce-scatter": partial(dist.reduce_scatter, own, list(torch.split(full, part))),
        "all-to-all": partial(dist.all_to_all_single, torch.empty_like(full), full),
    }
    return calls[collective]


def _shift(rank: int, size: int, num_bytes: int) -> float:
    """Seconds in which every rank sends a message to the next one, and receives one."""
    steps = ALGORITHMS["all-gather"][0].steps(size)[:1]
    length = max(1, num_bytes // 4)
    held = {rank: torch.ones(length)}
    return _seconds(lambda: run_steps(steps, rank, dict(held), length))


def measured(rank: int, size: int, num_bytes: int, names: Sequence[str]) -> dict[str, object]:
    """What all processes find together; every process calls it."""
    least, most = _shift(rank, size, 4), _shift(rank, size, num_bytes)
    found: dict[str, dict[str, float]] = {}
    for name in names:
        found[name] = {each.kind: _timed(each, rank, size, num_bytes) for each in ALGORITHMS[name]}
        found[name]["library"] = _seconds(_library(name, rank, size, num_bytes))
    rate = num_bytes / max(1e-9, most - least)
    return {"latency_seconds": least, "bytes_per_second": rate, "seconds": found}


def main() -> None:
    """Measure as one process, and write what all found."""
    member = launcher.membership(os.environ)
    assert member is not None
    with launcher.last_words(member):
        path, num_bytes, names = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(",")
        torch.set_num_threads(max(1, usable_cores() // member.world_size))
        rendezvous.join(member, "gloo")
        found = measured(member.rank, member.world_size, num_bytes, names)
        if member.rank == 0:
            write_whole(Path(path), json.dumps(found))
        dist.barrier()
    launcher.leave(0)


if __name__ == "__main__":
    main()
