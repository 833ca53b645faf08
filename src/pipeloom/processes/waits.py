"""Which ranks a thread waits for, read from its stack only when a watchdog asks.

A function that waits for other processes declares them with `waits_for`. Functions of torch.distributed are known.
"""

from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

# From the local variables of a function to the ranks in the default group that it waits for.
Peers = Callable[[Mapping[str, Any]], Iterable[int]]
Function = TypeVar("Function", bound=Callable[..., Any])
_DECLARED: dict[CodeType, Peers] = {}
_TORCH_FILE = distributed_c10d.__file__


def waits_for(peers: Peers) -> Callable[[Function], Function]:
    """Declare which ranks the decorated function waits for. They are computed when a stack is read, not in a call."""

    def declare(function: Function) -> Function:
        assert isinstance(function, FunctionType)
        _DECLARED[function.__code__] = peers
        return function

    return declare


def waited_for(frame: FrameType | None) -> tuple[int, ...] | None:
    """The ranks that a stack waits for, without this process's; None: it waits for none."""
    while frame is not None:
        peers = _DECLARED.get(frame.f_code)
        if peers is None and frame.f_code.co_filename == _TORCH_FILE:
            peers = _peers_of_collective
        if peers is not None:
            try:
                found = sorted({*peers(frame.f_locals)} - {dist.get_rank()})
            except Exception:  # the stack goes on meanwhile
                return None
            return tuple(found)
        frame = frame.f_back
    return None


def _peers_of_collective(at: Mapping[str, Any]) -> Iterable[int]:
    """The ranks that a function of torch.distributed waits for: one end of a message, or a group."""
    for name in ("src", "dst"):
        if "tensor" in at and isinstance(at.get(name), int):
            return (at[name],)
    group = at.get("group")
    return dist.get_process_group_ranks(group if isinstance(group, dist.ProcessGroup) else None)
