"""`Mesh`: the processes of a run on named axes, with what communicates along each. `mesh_shape` has the arithmetic.

group(axis)       process group of torch.distributed along one axis
links(axes)       collectives that overlap computations, between data-parallel replicas
axis(name)        `Axis`: collectives inside actions, between the processes that share a stage
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipeloom.devices import Device, device_of, sharing_of
from pipeloom.devices.communicators import COMMUNICATORS
from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis, AxisMeter
from pipeloom.parallel.axis_forms import ChannelAxis, GroupAxis
from pipeloom.parallel.data.links import Links, ProcessLinks, SharedChannels, SharedLinks, ThreadLinks
from pipeloom.parallel.mesh_groups import MeshGroups
from pipeloom.parallel.mesh_shape import AXES, MeshShape, check_line, check_parts
from pipeloom.parallel.placed import Place
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.members import Members, ProcessMembers, current_members
from pipeloom.transport import shared_memory
from pipeloom.transport.interface import Lane, Transport
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.thread_members import ThreadMembers


class Mesh:
    """All processes of the default process group, on named axes; or all threads of `pipeloom.run_threads`.

    Every process makes the same mesh, after ``torch.distributed.init_process_group``. One degree may be -1: it uses all
    remaining processes. A mesh serves any number of pipelines, one after another. A ``with`` closes it at its end.

    Args:
        pp: pipeline-parallel degree.
        dp: data-parallel degree.
        cp: context-parallel degree: processes that share the sequences.
        tp: tensor-parallel degree: processes that share the layers of a stage.
        ep: degree of expert parallelism: processes that share the experts of a layer (arXiv:2006.16668). It divides the
            processes along `expert_axes`, see `pipeloom.parallel.mesh_shape`. Replicas of dense parameters are the
            processes along dp and cp, replicas of experts those along "edp".
        expert_axes: axes that ep divides: dp, cp or both.
        order: mesh axes, outermost first. Neighbours on the last axis have adjacent ranks. Axes of degree 1 may be
            omitted.

    Attributes:
        shape: degrees and rank order.
        rank: of this process, in the default group.
        members: exchange small values between all processes of the mesh.
        meter: counts the collectives of `axis`.

    Raises:
        InputError: there is no process group, the degrees do not match its size, `ep` does not divide the processes
            along `expert_axes`, or processes pass different degrees.
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
        expert_axes: Sequence[str] = ("dp",),
        order: Sequence[str] = AXES,
    ) -> None:
        members = current_members()
        if members is None:
            raise InputError(
                "Mesh() needs a process group: start the processes with torchrun and call "
                "torch.distributed.init_process_group(). In a single process, remove mesh, or use pipeloom.run_threads."
            )
        self.members: Members = members
        self.rank = members.rank
        degrees = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        self.shape = MeshShape.of(degrees, num_processes=members.size, order=order, ep=ep, expert_axes=expert_axes)
        self.meter = AxisMeter()
        self._groups = MeshGroups(self.shape, self.rank)
        self._axes: dict[str, Axis] = {}
        self._parts: dict[str, int] = {}  # of axis tp, outermost first
        self._transport: Transport | None = None  # of `_axes`, where they have channels
        self._replica_transport: SharedMemoryTransport | None = None  # of `links`, likewise
        self._channels: dict[Lane, SharedChannels | None] = {}  # None: not all replicas are on this host
        try:
            self._agree()
        except InputError:
            self.close()
            raise
        self._overlaps_on: Device | None = None  # where collectives of two streams overlap
        self._connects_on: Device | None = None  # where groups get their communicators before the first step
        if isinstance(members, ProcessMembers):
            self._groups.make()
            self._connects_on = self._own_device()

    def _own_device(self) -> Device | None:
        """The GPU of this process; None: there is no NCCL, or not all processes have a GPU of their own."""
        if "nccl" not in dist.get_backend_config():
            return None
        has_gpu = torch.cuda.is_available()
        found = device_of(torch.device("cuda", torch.cuda.current_device())) if has_gpu else None
        own = "" if found is None else sharing_of(found.device).identity
        identities = self.members.gather(own.encode())
        return found if all(identities) and len({*identities}) == len(identities) else None

    def _connected(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The group, with its NCCL communicator; every member calls it."""
        if self._connects_on is not None:
            with noticing_lost_peers():
                COMMUNICATORS.connect(group, self._connects_on, lambda element: dist.all_reduce(element, group=group))
        return group

    def _agree(self) -> None:
        """Compare the meshes of all processes before groups are made: different groups would hang."""
        own = f"{self.shape} in the order {','.join(self.shape.axes)}"
        for rank, other in enumerate(self.members.gather(own.encode())):
            if other != own.encode():
                raise InputError(
                    f"process {self.rank} has a mesh of {own}, process {rank} a mesh of {other.decode()}: all "
                    "processes must form one mesh. Pass the same degrees and order on each."
                )

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """torch's ``DeviceMesh``, with the axes pp, dp and those of degrees above 1; None between threads."""
        return self._groups.device_mesh

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """A gloo group over the whole mesh, for small values on the CPU. Raises InputError between threads."""
        if not isinstance(self.members, ProcessMembers):
            raise InputError(f"mesh {self} is made of threads, which have no process group. Use mesh.members.")
        return self.members.group

    def degree(self, axis: str) -> int:
        """The degree of an axis, or of ep or edp. Raises InputError for an unknown axis."""
        return self.shape.degree(axis)

    def coordinate(self, axis: str) -> int:
        """The coordinate of this process on an axis, or on ep or edp. Raises InputError for an unknown axis."""
        return self.shape.coordinate(axis, self.rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis through this process, on the backend of the default group.

        Raises:
            InputError: the axis is unknown, or has degree 1 and is not pp or dp; or the mesh is closed.
        """
        if isinstance(self.members, ThreadMembers):
            raise InputError(f"mesh {self} is made of threads, which have no process groups. Use mesh.axis({axis!r}).")
        return self._groups.along(axis)

    def links(self, *axes: str) -> Links:
        """Overlapping collectives between all processes that differ from this one on `axes` alone, in order of rank.

        Args:
            axes: of the mesh, such as dp and cp for the replicas of dense parameters, or "edp" for those of experts.
        """
        line = tuple(sorted(self.shape.along_all(axes, self.rank)))
        lane = Lane.EXPERT_REPLICA if "edp" in axes else Lane.REPLICA
        if isinstance(self.members, ThreadMembers):
            return ThreadLinks(self.members.transport(line), len(line), line.index(self.rank), lane)

        def group() -> dist.ProcessGroup:
            return self._groups.along_all(axes)

        self._connected(group())  # `group` raises once it is closed
        channels = self._shared_channels(line, lane)
        return ProcessLinks(group) if channels is None else SharedLinks(group, channels)

    def _shared_channels(self, line: tuple[int, ...], lane: Lane) -> SharedChannels | None:
        """Channels between replicas of one host; None: some are on other hosts. Every process calls it."""
        if "nccl" in dist.get_backend_config() or not shared_memory.available():
            return None
        if lane not in self._channels:
            if self._replica_transport is None:
                self._replica_transport = SharedMemoryTransport(self.rank, self.members.gather)
            local = self._replica_transport
            reached = all(local.reaches(peer, of=line[0]) for peer in line)
            self._channels[lane] = SharedChannels(local, line, line.index(self.rank), lane) if reached else None
        return self._channels[lane]

    @property
    def message_bytes(self) -> int:
        """Shared memory that this process keeps for messages to replicas on its host."""
        return sum(channels.num_bytes for channels in self._channels.values() if channels is not None)

    def divide(self, **parts: int) -> None:
        """Arrange the processes of axis tp in a grid, whose axes `axis` and `place` then know. Every process calls it.

        Args:
            parts: degrees of the grid by axis, outermost first, such as tp_row=2, tp_column=2.

        Raises:
            InputError: a name of a mesh axis, a degree below 1, their product is not the degree of tp, or tp is divided
                in another way.
        """
        check_parts(parts)
        if math.prod(parts.values()) != self.degree("tp"):
            grid = " x ".join(f"{name} {degree}" for name, degree in parts.items())
            raise InputError(f"a grid of {grid} on a mesh with tp={self.degree('tp')}: the product must be equal.")
        if self._parts and list(self._parts.items()) != list(parts.items()):  # the order counts
            raise InputError(f"mesh {self} is divided into {self._parts} already. Make another Mesh for {parts}.")
        self._parts = dict(parts)

    @property
    def place(self) -> Place:
        """The coordinates of this process on the axes inside a stage: tp, or those into which it is divided."""
        degrees = self._parts or {"tp": self.degree("tp")}
        coordinates, number = {}, self.coordinate("tp")
        for name, degree in reversed(degrees.items()):
            number, coordinates[name] = divmod(number, degree)
        return Place(coordinates, degrees)

    @property
    def expert_place(self) -> Place:
        """The coordinates of this process on the axes that cut experts: ep and those of `place`."""
        coordinates, degrees = self.place
        return Place({"ep": self.coordinate("ep"), **coordinates}, {"ep": self.degree("ep"), **degrees})

    def line(self, *names: str) -> tuple[int, ...]:
        """The processes along axes through this one, by rank in the default group; the last axis is the fastest.

        Raises:
            InputError: no axis, an unknown one, one twice, or axes that cannot be named together.
        """
        check_line(names, self._parts)
        if not any(name in self._parts for name in names):
            return self.shape.along_all(names, self.rank)
        here, coordinates = self.place, self.shape.coordinates(self.rank)
        line = []
        for values in product(*(range(self._parts[name]) for name in names)):
            there = here._replace(coordinates={**here.coordinates, **dict(zip(names, values, strict=True))})
            line.append(self.shape.process({**coordinates, "tp": there.member(list(self._parts))}))
        return tuple(line)

    def axis(self, *names: str) -> Axis:
        """The collectives along one axis, or several together, through this process. Every process calls it.

        Several axes form one, whose coordinates run through the last of `names` first. Between processes of one host
        without NCCL tensors pass through shared memory, between threads through queues, elsewhere through
        torch.distributed.

        Args:
            names: axes of the mesh, ep, or parts of tp, see `divide`.

        Raises:
            InputError: an unknown axis, or the mesh is closed.
        """
        joint = "+".join(names)
        return self._axes.get(joint) or self._make_axis(joint, joint, self.line(*names))

    def axis_between(self, members: Sequence[int], name: str) -> Axis:
        """The collectives between some members of an axis, this process among them; every one of them calls it.

        Args:
            members: their ranks in the default group, in the order of coordinates.
            name: for counts and timelines.
        """
        key = f"{name} {','.join(map(str, members))}"
        return self._axes.get(key) or self._make_axis(key, name, tuple(members))

    def _make_axis(self, key: str, name: str, line: tuple[int, ...]) -> Axis:
        self._groups.check_open()
        self._axes[key] = self._connect(name, line)
        return self._axes[key]

    def _connect(self, name: str, line: tuple[int, ...]) -> Axis:
        index = line.index(self.rank)
        if len(line) == 1:
            return ChannelAxis(name, None, line, 0, copies=False, meter=self.meter)
        if isinstance(self.members, ThreadMembers):
            transport = self.members.transport()
            transport.open(ChannelAxis.channels_between(line))
            return ChannelAxis(name, transport, line, index, copies=True, meter=self.meter)
        if "nccl" not in dist.get_backend_config() and shared_memory.available():
            if self._transport is None:
                sharing = sharing_of() if torch.cuda.is_available() else None
                self._transport = SharedMemoryTransport(self.rank, self.members.gather, sharing=sharing)
            local = self._transport
            assert isinstance(local, SharedMemoryTransport)
            if all(local.reaches(peer, of=line[0]) for peer in line):
                local.open(ChannelAxis.channels_between(line))
                return ChannelAxis(name, local, line, index, copies=False, meter=self.meter)
        axis = GroupAxis(name, self._connected(self._groups.of(line)), line, self.meter)
        self._overlap(axis)
        return axis

    def overlap_pairs(self, device: Device) -> None:
        """Collectives inside an F and a B that overlap pass each other: those of each stream have their own groups.

        A group runs its collectives in the order in which they are started. Every process calls it.

        Args:
            device: where this process computes.
        """
        if self._overlaps_on is None:
            self._overlaps_on = device
            for axis in self._axes.values():
                self._overlap(axis)

    def _overlap(self, axis: Axis) -> None:
        if self._overlaps_on is not None and isinstance(axis, GroupAxis):
            axis.overlap(self._connected(self._groups.second_of(axis.members)), self._overlaps_on)

    def leave(self, *axes: str) -> None:
        """Called after an error: closes what communicates along the axes, so that other processes stop waiting.

        With gloo they notice the closed connections. With NCCL they wait until their timeout.
        """
        for transport in (self._transport, self._replica_transport):
            if transport is not None:
                transport.close()
        self._groups.leave(axes)

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Ranks in the default group: all processes, in groups along an axis."""
        return self.shape.lines(axis)

    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The processes that get the same batch: those with the same coordinate on axis dp."""
        groups = ([*range(self.shape.num_processes)] for _ in range(self.degree("dp")))
        return tuple(tuple(p for p in group if self.shape.coordinate("dp", p) == dp) for dp, group in enumerate(groups))

    def close(self) -> None:
        """Destroy the groups of this mesh, with their threads and sockets; every process closes its mesh.

        Close its pipelines first. Needed where a process makes one mesh after another:
        ``torch.distributed.destroy_process_group()`` destroys the groups too. Closing twice does nothing.
        """
        self._groups.close()
        self._axes.clear()
        for transport in (self._transport, self._replica_transport):
            if transport is not None:
                transport.close()
        self.members.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error, collectives with lost processes never end
            self.close()

    def __repr__(self) -> str:
        return f"Mesh({self})"

    def __str__(self) -> str:
        return str(self.shape)
