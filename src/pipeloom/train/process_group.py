"""The process group of a run, and its small collectives."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.common.quantities import bytes_text, counted
from pipeloom.devices.communicators import COMMUNICATORS
from pipeloom.parallel import Mesh
from pipeloom.processes import rendezvous
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.collectives import all_gather_bytes, noticing_lost_peers
from pipeloom.processes.exchange import Exchange
from pipeloom.processes.hang_report import patient_seconds
from pipeloom.processes.launcher import Membership
from pipeloom.processes.preemption import Preemption
from pipeloom.processes.watchdog import Watchdog
from pipeloom.train.config.schedule import process_names
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.training.stream.stream_stop import StreamStop
from pipeloom.transport.thread_members import ThreadMembers

_SECONDS = 1800.0  # how long threads wait for each other


class Group(Exchange):
    """All processes of a run, this process alone, or the threads of `pipeloom.run_threads`, which act as processes.

    Attributes:
        rank, size: of this process among the processes.
        device: where this process computes.
        processes_per_device: how many processes compute on the same GPU as this one, itself included; 1 on a CPU.
        mesh: the process mesh; None for one data-parallel replica whose stages have a process each.
        data_degree, replica: the data-parallel degree, and the replica of this process.
        pipeline_rank: this process's rank in its replica; None where the process holds all ranks.
        leads: whether this process is in the first replica, and the first of those that share its stage.
        place: this process's number when all pipelines are listed one after another, the ranks of each in order.
        seed_rank: number of this process that is equal for all tensor-parallel ranks: they draw the same numbers.
        preemption: whether a signal asks the run to end.
        black_box: in which this process notes its phase and its actions.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        mesh: Mesh | None = None,
        preemption: Preemption | None = None,
        black_box: BlackBox | None = None,
        processes_per_device: int = 1,
    ) -> None:
        self.processes_per_device = processes_per_device
        self.preemption = preemption or Preemption()
        self.black_box = BlackBox() if black_box is None else black_box
        self.rank = rank
        self.size = size
        self.device = device
        self.mesh = mesh
        self.data_degree, self.replica = (mesh.degree("dp"), mesh.coordinate("dp")) if mesh else (1, 0)
        self.pipeline_rank = None if size == 1 else mesh.coordinate("pp") if mesh else rank
        self.place = self.seed_rank = rank
        self.leads = True
        self._threads = mesh.members if mesh is not None and isinstance(mesh.members, ThreadMembers) else None
        if mesh is not None:
            at, degree = mesh.shape.coordinates(mesh.rank), mesh.degree
            pipeline = (self.replica * degree("cp") + at["cp"]) * degree("tp") + at["tp"]
            self.place, self.leads = pipeline * degree("pp") + at["pp"], pipeline == 0
            self.seed_rank = mesh.shape.process({**at, "tp": 0})

    def stream_stop(self, period: int) -> StreamStop:
        """What decides after which batch a stream ends early; see `StreamStop`."""
        if self._threads is None:
            return StreamStop(self.preemption, period, self.rank, self.size)
        with self.preemption.lock:
            found: StreamStop = self.preemption.shared.setdefault("stop", StreamStop(self.preemption, period, 0, 1))
        return found

    def all_gather(self, payload: bytes) -> list[bytes]:
        if self._threads is not None:
            return self._threads.gather(payload)
        return [payload] if self.size == 1 else all_gather_bytes(payload)

    def gather_json(self, value: Any) -> list[Any]:
        """Every process's JSON value, by rank."""
        return [json.loads(each) for each in self.all_gather(json.dumps(value).encode())]

    def communicators(self) -> str | None:
        """The NCCL communicators of the process where they take most memory; None: there are none."""
        found = self.gather_json([COMMUNICATORS.num_bytes, COMMUNICATORS.number])
        num_bytes, number = max(found)
        if not number:
            return None
        rank, memory = found.index([num_bytes, number]), bytes_text(num_bytes)
        return f"{counted(number, 'communicator')} in {memory} of device memory (rank {rank})"

    def sum(self, values: Tensor) -> Tensor:
        """The sum over processes, in place and on the CPU, in the order of ranks: bitwise reproducible."""
        if self._threads is not None:
            return self._threads.sum(values, _SECONDS)
        if self.size > 1:
            with noticing_lost_peers():
                dist.all_reduce(values)
        return values

    def from_rank(self, source: int, values: Tensor) -> Tensor:
        """`values` of rank `source` of the first replica, in place, on every process."""
        if self.size > 1:
            process = source if self.mesh is None else self.mesh.shape.process({"pp": source})
            if self._threads is not None:
                return self._threads.sum(values if self.rank == process else values.zero_(), _SECONDS)
            with noticing_lost_peers():
                dist.broadcast(values, process)
        return values


@contextmanager
def join(member: Membership | None, config: TrainConfig, preemption: Preemption | None = None) -> Iterator[Group]:
    """Join the process group of the run, which exists inside the block."""
    device, sharing = device_of_process(member)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if member is None:
        black_box = BlackBox()
        with _watched(config, black_box, None):
            if config.num_threads == 1:
                yield Group(0, 1, device, None, preemption, black_box)
            else:
                with make_mesh(config, config.num_threads) as mesh:
                    yield Group(mesh.rank, config.num_threads, device, mesh, preemption, black_box)
        return
    # NCCL needs a GPU per process. Without it, what replicas exchange passes through the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and sharing == 1 else "gloo"
    limit = patient_seconds(config.watchdog_seconds) if config.watchdog else rendezvous.STARTING_SECONDS
    rendezvous.join(member, backend, limit)
    group = Group(member.rank, member.world_size, device, None, preemption, member.black_box, sharing)
    with _watched(config, member.black_box, member) as watchdog:
        if watchdog is not None:
            group.preemption.ask_ranks = watchdog.ask_late
        try:
            yield group if config.measures_plan else with_layout(group, config)
        finally:
            group.preemption.ask_ranks = None
    dist.destroy_process_group()  # not after an error: others may be gone


def device_of_process(member: Membership | None) -> tuple[torch.device, int]:
    """Where a process computes, and how many processes of its machine compute on the same GPU (1 on a CPU).

    Processes are dealt out to the GPUs in the order of their local ranks. ``CUDA_VISIBLE_DEVICES=""`` hides all GPUs.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_devices:
        return torch.device("cpu"), 1
    local_rank, local_size = (member.local_rank, member.local_size) if member else (0, 1)
    index = local_rank % num_devices
    return torch.device("cuda", index), len(range(index, local_size, num_devices))


def _watched(
    config: TrainConfig, black_box: BlackBox, member: Membership | None
) -> AbstractContextManager[Watchdog | None]:
    """A watchdog of this process, unless the run has none."""
    if not config.watchdog:
        return nullcontext()
    black_box.enter("setup", patient=True)
    name = process_names(config)[member.rank] if member else None
    return Watchdog(config.watchdog_seconds, black_box=black_box, member=member, always=True, name=name)


def with_layout(group: Group, config: TrainConfig) -> Group:
    """The processes of a group at their places in the mesh of a configuration; a collective call."""
    shared = make_mesh(config, group.size) if group.size > config.num_ranks else None
    together = group.processes_per_device
    return Group(group.rank, group.size, group.device, shared, group.preemption, group.black_box, together)


def make_mesh(config: TrainConfig, num_processes: int) -> Mesh:
    """The mesh of a run; each of its processes calls this."""
    shape = config.mesh_shape(num_processes)
    pp, dp, cp, tp = map(shape.degree, ("pp", "dp", "cp", "tp"))
    return Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=shape.ep, expert_axes=shape.expert_axes, order=shape.axes)
