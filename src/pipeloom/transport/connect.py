"""Chooses the transport between the ranks of a pipeline, and prepares it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeloom.errors import InputError
from pipeloom.processes.agreement import RunFingerprint
from pipeloom.processes.members import Members, current_members
from pipeloom.transport import shared_memory
from pipeloom.transport.device_places import check_devices
from pipeloom.transport.hybrid import HybridTransport
from pipeloom.transport.interface import OneProcessTransport, Transport
from pipeloom.transport.loopback import LoopbackTransport
from pipeloom.transport.thread_members import ThreadMembers
from pipeloom.transport.torch_distributed import TorchDistributedTransport

TRANSPORTS = ("auto", "loopback", "threads", "shared-memory", "cuda-ipc", "torch")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Connection:
    """How this process reaches the other ranks.

    Attributes:
        rank: this process's rank in its replica of the pipeline; None where the process holds all ranks.
        transport: carries messages between the ranks of one replica.
        members: all ranks of all replicas, for small exchanges; None where the process holds all ranks.
        owns_members: whether `connect` made `members`.
        replicas: the processes of each replica of the pipeline, by their rank among `members`.
        batches: the processes that read the same batch, in the same way.
        timeout_seconds: how long a collective waits.
    """

    rank: int | None
    transport: Transport
    members: Members | None
    owns_members: bool = False
    timeout_seconds: float = 1800.0
    replicas: Sequence[Sequence[int]] = ()
    batches: Sequence[Sequence[int]] = ()

    @property
    def own_replica(self) -> Sequence[int]:
        """The processes of this one's replica; empty where it holds all ranks."""
        process = None if self.members is None else self.members.rank
        return next((replica for replica in self.replicas if process in replica), ())

    def sum_over_processes(self, values: Tensor) -> Tensor:
        """The sum of a small CPU tensor over the processes of all ranks and replicas, in place.

        Raises:
            PeerLost: a process ended or timed out.
        """
        return values if self.members is None else self.members.sum(values, self.timeout_seconds)

    def close(self) -> None:
        """Destroy the process groups that `connect` made. The transport is closed before."""
        if self.owns_members and self.members is not None:
            self.members.close()


def connect(
    num_ranks: int,
    transport: str | Transport,
    timeout_seconds: float,
    fingerprint: RunFingerprint,
    *,
    replicas: Sequence[Sequence[int]] | None = None,
    batches: Sequence[Sequence[int]] | None = None,
    members: Members | None = None,
    device: torch.device = _CPU,
) -> Connection:
    """Prepare `transport` between `num_ranks` ranks.

    Args:
        num_ranks: ranks of one replica.
        transport: a name of `TRANSPORTS`, or a transport.
        timeout_seconds: how long a rank waits for a message or a collective.
        fingerprint: of the run; all processes must have the same.
        replicas: the processes of each data-parallel replica, by their rank among `members`. None: all processes form
            one replica.
        batches: the processes that read the same batch. None: those of a replica.
        members: the processes of all replicas. Needed with `replicas`.
        device: where this process computes.

    Raises:
        InputError: an unknown name, no process group where one is needed, another number of processes than ranks,
            another fingerprint on another rank, or devices that the transport does not connect.
    """
    if not isinstance(transport, Transport) and transport not in TRANSPORTS:
        others = "" if isinstance(transport, str) else ", or a pipeloom.transport.Transport"
        raise InputError(f"transport={transport!r}: must be one of {', '.join(TRANSPORTS)}{others}.")
    if members is None:
        members, owns = current_members(), True
    else:
        owns = False
    threads = isinstance(members, ThreadMembers)
    if transport == "auto" and members is None and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
        raise InputError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']}: torchrun started several processes without process group: each "
            "would train a model of its own. Call torch.distributed.init_process_group(), or use transport='loopback'."
        )
    if transport == "auto" and (members is None or (threads and replicas is None)):
        transport = "loopback"
    if transport in ("loopback", "threads") or isinstance(transport, OneProcessTransport):
        if replicas is not None and len(replicas) > 1:
            raise InputError(
                f"the transport stays inside one process, but the mesh has {len(replicas)} replicas of the pipeline: "
                "each rank of each replica needs its own process. Leave `transport` out."
            )
        if not isinstance(transport, Transport):
            transport = LoopbackTransport(blocking=transport == "threads", timeout_seconds=timeout_seconds)
        return Connection(None, transport, None)
    if members is None:
        name = repr(transport) if isinstance(transport, str) else type(transport).__name__
        raise InputError(
            f"transport={name}: it needs a process group. Start one process per rank with torchrun and call "
            "torch.distributed.init_process_group, or use transport='loopback'."
        )
    try:
        fingerprint.agree(members, timeout_seconds)
        _check_size(num_ranks, replicas, members.size)
        replicas = replicas or [range(num_ranks)]
        own = tuple(next(replica for replica in replicas if members.rank in replica))
        rank = own.index(members.rank)
        if isinstance(members, ThreadMembers):
            transport = members.transport(own)
        elif not isinstance(transport, Transport):
            transport = _between_processes(transport, rank, replicas, members, timeout_seconds, device)
    except BaseException:
        if owns:
            members.close()
        raise
    return Connection(rank, transport, members, owns, timeout_seconds, replicas, batches or replicas)


def _check_size(num_ranks: int, replicas: Sequence[Sequence[int]] | None, num_processes: int) -> None:
    """Raises InputError where a replica has another number of processes than the schedule has ranks."""
    if replicas is not None and len(replicas[0]) != num_ranks:
        raise InputError(
            f"the schedule has {num_ranks} ranks and mesh axis pp has degree {len(replicas[0])}: they must be equal. "
            f"Use Mesh(pp={num_ranks}, ...)."
        )
    if replicas is None and num_processes != num_ranks:
        raise InputError(
            f"the schedule has {num_ranks} ranks and the process group {num_processes} processes: they must be "
            f"equal. Start {num_ranks} processes, make a schedule of {num_processes} ranks, or pass a "
            "pipeloom.Mesh for data-parallel replicas."
        )


def _between_processes(
    name: str,
    rank: int,
    replicas: Sequence[Sequence[int]],
    members: Members,
    timeout_seconds: float,
    device: torch.device,
) -> Transport:
    """The transport of this process, which is rank `rank` of one of the `replicas` and computes on `device`."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    own = next(replica for replica in replicas if members.rank in replica)
    sharing = check_devices(name, device, replicas, members)
    make_remote = partial(
        TorchDistributedTransport, rank, device=device, replicas=replicas, timeout_seconds=timeout_seconds
    )
    alone = device.type == "cuda" and sharing is None  # the driver shares no memory
    if name == "torch" or alone or not shared_memory.available():
        if name not in ("auto", "torch"):
            raise InputError(f"transport={name!r} needs Linux. Use transport='torch'.")
        return make_remote()
    local = shared_memory.SharedMemoryTransport(
        rank,
        members.gather,
        processes=own,
        timeout_seconds=timeout_seconds,
        sharing=sharing,
    )
    if name == "auto":
        remote = make_remote(idle=local.flush)
        return HybridTransport(local, remote, lambda channel: local.reaches(channel.source, of=channel.target))
    apart = [peer for peer in range(len(own)) if not local.reaches(peer, of=rank)]
    if apart:
        which = "GPUs of one machine with peer access" if sharing is not None else "processes of one machine"
        raise InputError(f"transport={name!r} connects {which}, and ranks {apart} are elsewhere. Use transport='auto'.")
    return local
