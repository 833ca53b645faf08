"""Choose how the ranks of a pipeline reach each other, and prepare it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.processes.agreement import RunFingerprint
from pipeloom.processes.collectives import all_gather_bytes, all_reduce, cpu_group, destroy_groups
from pipeloom.processes.process_mesh import ProcessMesh
from pipeloom.transport import shared_memory
from pipeloom.transport.hybrid import HybridTransport
from pipeloom.transport.interface import Transport
from pipeloom.transport.loopback import LoopbackTransport
from pipeloom.transport.torch_distributed import TorchDistributedTransport

TRANSPORTS = ("auto", "loopback", "threads", "shared-memory", "torch")


@dataclass(frozen=True)
class Connection:
    """What `connect` found.

    Attributes:
        rank: this process's rank in its copy of the pipeline; None where the process holds all ranks.
        transport: how messages travel, inside one copy.
        process_group: for collectives of small numbers on the CPU, over all ranks of all copies; None where the
            process holds all ranks.
        groups: what was made for it.
        timeout_seconds: how long a collective waits.
    """

    rank: int | None
    transport: Transport
    process_group: dist.ProcessGroup | None
    groups: tuple[dist.ProcessGroup, ...] = ()
    timeout_seconds: float = 1800.0

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """The sum of a small CPU tensor over the processes of all ranks and replicas, in place.

        Raises:
            PeerLost: a process ended, or did not come in time.
        """
        if self.process_group is None:
            return values
        return all_reduce(values, self.process_group, self.timeout_seconds)

    def close(self) -> None:
        """Let go of what was made; the transport was closed before."""
        destroy_groups(self.groups)


def connect(
    num_ranks: int,
    transport: str | Transport,
    timeout_seconds: float,
    terms: RunFingerprint,
    mesh: ProcessMesh | None = None,
) -> Connection:
    """Prepare `transport` for `num_ranks` ranks, which are processes of one mind about the `terms`.

    With a `mesh` those along its axis pp are the ranks of one copy of the pipeline.

    Raises:
        InputError: unknown name, no process group where one is needed, or one of another size, a mesh that does not
            fit, or other terms on another rank.
    """
    if not isinstance(transport, str | Transport):
        raise InputError(
            f"transport is {transport!r}: it is one of {', '.join(TRANSPORTS)}, or a Transport; choose one"
        )
    if isinstance(transport, str) and transport not in TRANSPORTS:
        raise InputError(f"transport {transport!r} is unknown: it is one of {', '.join(TRANSPORTS)}")
    grouped = dist.is_available() and dist.is_initialized()
    if transport == "auto" and not grouped:
        transport = "loopback"
    if transport in ("loopback", "threads") or isinstance(transport, LoopbackTransport):
        if mesh is not None and mesh.degree("dp") > 1:
            raise InputError(
                f"a mesh of {mesh.degree('dp')} copies of the pipeline and a transport inside one process: every rank "
                "of every copy is a process; leave transport out"
            )
        if not isinstance(transport, Transport):
            transport = LoopbackTransport(blocking=transport == "threads", timeout_seconds=timeout_seconds)
        return Connection(None, transport, None)
    if not grouped:
        raise InputError(
            f"transport {transport!r} without a process group: its ranks are processes; start them with torchrun and "
            "call torch.distributed.init_process_group, or use transport='loopback'"
        )
    # Small numbers on the CPU go around beside the pipeline's messages.
    group, made = (mesh.cpu_group, ()) if mesh is not None else cpu_group()
    try:
        terms.agree(group, timeout_seconds)
        _check_size(num_ranks, mesh)
        copies = (tuple(range(num_ranks)),) if mesh is None else mesh.lines("pp")
        rank = dist.get_rank() if mesh is None else mesh.coordinate("pp")
        if not isinstance(transport, Transport):
            transport = _between_processes(transport, rank, copies, group, timeout_seconds)
    except BaseException:
        destroy_groups(made)
        raise
    return Connection(rank, transport, group, made, timeout_seconds)


def _check_size(num_ranks: int, mesh: ProcessMesh | None) -> None:
    """Raises InputError where there are not as many processes as ranks, or a mesh has axes that are not served."""
    if mesh is None:
        if dist.get_world_size() != num_ranks:
            raise InputError(
                f"a schedule of {num_ranks} ranks in a process group of {dist.get_world_size()}: the numbers must be "
                f"equal; start {num_ranks} processes, or make a schedule of {dist.get_world_size()} ranks, or give a "
                "Mesh for copies of the pipeline"
            )
        return
    if mesh.degree("pp") != num_ranks:
        raise InputError(
            f"a schedule of {num_ranks} ranks on a mesh of {mesh}: axis pp holds the ranks; give it degree {num_ranks}"
        )
    if mesh.degree("pp") * mesh.degree("dp") != dist.get_world_size():
        raise InputError(f"a Pipeline on a mesh of {mesh}: it runs on axes pp and dp; give the others degree 1")


def _between_processes(
    name: str,
    rank: int,
    copies: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None,
    timeout_seconds: float,
) -> Transport:
    """The transport of this process, which is rank `rank` of one of the `copies`."""
    backend = dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else torch.device("cpu")

    def make_far(idle: Callable[[], bool] = lambda: True) -> TorchDistributedTransport:
        return TorchDistributedTransport(
            rank, device=device, replicas=copies, timeout_seconds=timeout_seconds, idle=idle
        )

    if name == "torch" or (name == "auto" and (device.type != "cpu" or not shared_memory.available())):
        return make_far()
    if not shared_memory.available():
        raise InputError("transport 'shared-memory' on this system: it needs Linux; use transport='torch'")
    exchange = functools.partial(all_gather_bytes, group=group)
    own = next(copy for copy in copies if dist.get_rank() in copy)
    near = shared_memory.SharedMemoryTransport(rank, exchange, processes=own, timeout_seconds=timeout_seconds)
    if name == "shared-memory":
        strangers = [peer for peer in range(len(own)) if not near.reaches(peer, of=rank)]
        if strangers:
            raise InputError(
                f"transport 'shared-memory' with ranks {strangers} on another machine: it joins processes of one; "
                "use transport='auto'"
            )
        return near
    return HybridTransport(near, make_far(near.flush), lambda channel: near.reaches(channel.source, of=channel.target))
