"""Times of the collectives between replicas, with the allocations and copies that a unit makes for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import fmean, median

import torch
from torch import Tensor

from pipeloom.engine.overlap_times import Wait
from pipeloom.ir import DataStrategy, Op
from pipeloom.parallel.data.replica_group import ReplicaGroup

_Start = Callable[[Tensor, Tensor, Tensor], Wait]  # full tensor, this replica's shard, newly allocated full tensor


def time_collectives(
    replicas: ReplicaGroup,
    strategy: DataStrategy,
    op: Op,
    sizes: Iterable[int],
    *,
    device: torch.device | None = None,
    meet: Callable[[], object] = lambda: None,
    repeats: int = 5,
) -> list[tuple[int, float, float]]:
    """Time the gather (UNSHARD) or reduction (REDUCE_GRAD) of a strategy; every replica passes the same arguments.

    Args:
        replicas: the processes of the collective.
        strategy: determines the collective.
        op: UNSHARD or REDUCE_GRAD.
        sizes: bytes of full parameters or gradients, float32.
        device: of the tensors; the CPU by default.
        meet: called before each size, such as a barrier, so that all ranks of a pipeline start together.
        repeats: timed collectives per size, after one for warm-up.

    Returns:
        For each size: bytes, median seconds, and mean CPU seconds of this process. Empty where the strategy has no such
        collective, or there is one replica.
    """
    start = _collective(replicas, strategy, op)
    if start is None or replicas.degree == 1:
        return []
    found = []
    for size in sizes:
        elements = max(1, size // 4 // replicas.degree)
        whole, own = torch.zeros(elements * replicas.degree, device=device), torch.zeros(elements, device=device)
        seconds, cpu = [], []
        meet()
        for _ in range(1 + repeats):
            before, begin = time.process_time(), time.perf_counter()
            start(whole, own, torch.empty_like(whole))()
            if whole.is_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - before)
        found.append((whole.nbytes, median(seconds[1:]), fmean(cpu[1:])))
    return found


def _collective(replicas: ReplicaGroup, strategy: DataStrategy, op: Op) -> _Start | None:
    match strategy, op:
        case DataStrategy.DDP, Op.UNSHARD:
            return None
        case DataStrategy.DDP, _:
            return lambda whole, own, new: replicas.all_reduce(new.copy_(whole))
        case DataStrategy.PARAMETER_SERVER, Op.UNSHARD:
            return lambda whole, own, new: replicas.broadcast(whole)
        case DataStrategy.PARAMETER_SERVER, _:
            return lambda whole, own, new: replicas.reduce(new.copy_(whole))
        case DataStrategy.ZERO3, Op.UNSHARD:
            return lambda whole, own, new: replicas.all_gather(new, own)
        case _, Op.UNSHARD:
            return lambda whole, own, new: replicas.all_gather(whole, own)
        case _:
            return lambda whole, own, new: replicas.reduce_scatter(new.copy_(whole), own)
