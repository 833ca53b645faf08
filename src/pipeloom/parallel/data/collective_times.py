"""What collectives of copies take by themselves, with the memory and the copies that a unit makes for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from statistics import fmean, median

import torch
from torch import Tensor

from pipeloom.engine.overlap_times import Wait
from pipeloom.ir import DataStrategy, Op
from pipeloom.parallel.data.replica_group import ReplicaGroup

_Start = Callable[[Tensor, Tensor, Tensor], Wait]  # of parameters or gradients: made before, this copy's part, new


def time_collectives(
    copies: ReplicaGroup,
    strategy: DataStrategy,
    op: Op,
    sizes: Iterable[int],
    *,
    device: torch.device | None = None,
    meet: Callable[[], object] = lambda: None,
    repeats: int = 5,
) -> list[tuple[int, float, float]]:
    """The gather (UNSHARD) or the reduction (REDUCE_GRAD) of a strategy; every copy calls it with the same arguments.

    Args:
        copies: who takes part.
        strategy: says which collective it is.
        op: UNSHARD or REDUCE_GRAD.
        sizes: bytes of whole parameters or gradients, float32.
        device: where they are; the CPU by default.
        meet: is called before each size, such as a barrier, so that all ranks of a pipeline go at once.
        repeats: of each size, behind one that warms up.

    Returns:
        For each size, its bytes, the median seconds of one, and the mean seconds of this process's cores; nothing where
        the strategy has no such collective, or there is one copy.
    """
    start = _collective(copies, strategy, op)
    if start is None or copies.degree == 1:
        return []
    found = []
    for size in sizes:
        elements = max(1, size // 4 // copies.degree)
        whole, own = torch.zeros(elements * copies.degree, device=device), torch.zeros(elements, device=device)
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


def _collective(copies: ReplicaGroup, strategy: DataStrategy, op: Op) -> _Start | None:
    match strategy, op:
        case DataStrategy.DDP, Op.UNSHARD:
            return None
        case DataStrategy.DDP, _:
            return lambda whole, own, new: copies.all_reduce(new.copy_(whole))
        case DataStrategy.PARAMETER_SERVER, Op.UNSHARD:
            return lambda whole, own, new: copies.broadcast(whole)
        case DataStrategy.PARAMETER_SERVER, _:
            return lambda whole, own, new: copies.reduce(new.copy_(whole))
        case DataStrategy.ZERO3, Op.UNSHARD:
            return lambda whole, own, new: copies.all_gather(new, own)
        case _, Op.UNSHARD:
            return lambda whole, own, new: copies.all_gather(whole, own)
        case _:
            return lambda whole, own, new: copies.reduce_scatter(new.copy_(whole), own)
