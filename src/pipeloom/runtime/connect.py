"""Choose how the ranks of a pipeline reach each other, and prepare it."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.runtime import shared_memory
from pipeloom.runtime.agreement import Terms
from pipeloom.runtime.collectives import all_gather_bytes
from pipeloom.runtime.loopback import LoopbackTransport
from pipeloom.runtime.mixed import MixedTransport
from pipeloom.runtime.torch_distributed import TorchDistributedTransport
from pipeloom.runtime.transport import Transport

TRANSPORTS = ("auto", "loopback", "threads", "shared-memory", "torch")


@dataclass(frozen=True)
class Connection:
    """What `connect` found.

    Attributes:
        rank: this process's rank; None where the process holds all ranks.
        transport: how messages travel.
        process_group: for collectives; None where the process holds all ranks.
    """

    rank: int | None
    transport: Transport
    process_group: dist.ProcessGroup | None


def connect(num_ranks: int, transport: str | Transport, timeout_seconds: float, terms: Terms) -> Connection:
    """Prepare `transport` for `num_ranks` ranks, which are processes of one mind about the `terms`.

    Raises:
        InputError: unknown name, no process group where one is needed, or one of another size, or other terms
            on another rank.
    """
    if isinstance(transport, LoopbackTransport):
        return Connection(None, transport, None)
    if isinstance(transport, str) and transport not in TRANSPORTS:
        raise InputError(f"transport {transport!r} is unknown: it is one of {', '.join(TRANSPORTS)}")
    grouped = dist.is_available() and dist.is_initialized()
    if transport == "auto" and not grouped:
        transport = "loopback"
    if transport in ("loopback", "threads"):
        return Connection(
            None, LoopbackTransport(blocking=transport == "threads", timeout_seconds=timeout_seconds), None
        )
    if not grouped:
        raise InputError(
            f"transport {transport!r} without a process group: its ranks are processes; start them with torchrun and "
            "call torch.distributed.init_process_group, or use transport='loopback'"
        )
    atexit.unregister(_let_gloo_finish)  # once, however many pipelines there are
    atexit.register(_let_gloo_finish)
    rank = dist.get_rank()
    # Small numbers on the CPU go around beside the pipeline's messages.
    group = dist.group.WORLD if "gloo" in dist.get_backend_config() else dist.new_group(backend="gloo")
    if group is not None:
        terms.agree(group)
    if dist.get_world_size() != num_ranks:
        raise InputError(
            f"a schedule of {num_ranks} ranks in a process group of {dist.get_world_size()}: the numbers must be "
            f"equal; start {num_ranks} processes, or make a schedule of {dist.get_world_size()} ranks"
        )
    if not isinstance(transport, Transport):
        transport = _between_processes(transport, rank, group, timeout_seconds)
    return Connection(rank, transport, group)


def _let_gloo_finish() -> None:
    """Before the interpreter shuts down, let gloo's threads have it once more.

    They let go of tensors a moment after a collective has returned, and need the interpreter for that. One that asks
    for it during the shutdown is ended inside C++ code, which aborts a process whose work is done.
    """
    time.sleep(0.1)


def _between_processes(name: str, rank: int, group: dist.ProcessGroup | None, timeout_seconds: float) -> Transport:
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    def make_far(idle: Callable[[], bool] = lambda: True) -> TorchDistributedTransport:
        return TorchDistributedTransport(rank, device=device, timeout_seconds=timeout_seconds, idle=idle)

    if name == "torch" or (name == "auto" and (device.type != "cpu" or not shared_memory.available())):
        return make_far()
    if not shared_memory.available():
        raise InputError("transport 'shared-memory' on this system: it needs Linux; use transport='torch'")
    exchange = functools.partial(all_gather_bytes, group=group)
    near = shared_memory.SharedMemoryTransport(rank, exchange, timeout_seconds=timeout_seconds)
    if name == "shared-memory":
        strangers = [peer for peer in range(dist.get_world_size()) if not near.reaches(peer, of=rank)]
        if strangers:
            raise InputError(
                f"transport 'shared-memory' with ranks {strangers} on another machine: it joins processes of one; "
                "use transport='auto'"
            )
        return near
    return MixedTransport(near, make_far(near.flush), lambda channel: near.reaches(channel.source, of=channel.target))
