"""`Mesh`: the processes of a run on named axes, with one process group per axis. `mesh_shape` has the arithmetic."""

import threading
from collections.abc import Sequence
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeloom.errors import InputError
from pipeloom.parallel.mesh_shape import AXES, MeshShape, check_axis
from pipeloom.processes.collectives import all_gather_bytes, cpu_group, destroy_groups


class Mesh:
    """All processes of the default process group, on named axes.

    Every process makes the same mesh, after ``torch.distributed.init_process_group``. One degree may be -1: it uses all
    remaining processes. A mesh serves any number of pipelines, one after another. A ``with`` closes it at its end.

    Args:
        pp: pipeline-parallel degree.
        dp: data-parallel degree.
        cp, ep, tp: degrees of context, expert and tensor parallelism, which a `Pipeline` does not support yet: 1.
        order: mesh axes, outermost first. Neighbours on the last axis have adjacent ranks. Axes of degree 1 may be
            omitted.

    Attributes:
        shape: degrees and rank order.
        rank: of this process, in the default group.
        cpu_group: gloo group over the whole mesh, for small values on the CPU.
        device_mesh: torch's ``DeviceMesh``, with the axes pp, dp and those of degrees above 1.

    Raises:
        InputError: there is no process group, the degrees do not match its size, or processes pass different degrees.
    """

    def __init__(
        self, *, pp: int = 1, dp: int = 1, cp: int = 1, ep: int = 1, tp: int = 1, order: Sequence[str] = AXES
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "Mesh() needs a process group: start the processes with torchrun and call "
                "torch.distributed.init_process_group(). In a single process, remove mesh."
            )
        self.rank = dist.get_rank()
        degrees = {"pp": pp, "dp": dp, "cp": cp, "ep": ep, "tp": tp}
        self.shape = MeshShape.of(degrees, num_processes=dist.get_world_size(), order=order)
        self.cpu_group, self._made = cpu_group()
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._is_closed = False
        try:
            self._agree()
        except InputError:
            self.close()
            raise
        used = [axis for axis in self.shape.axes if axis in ("pp", "dp") or self.degree(axis) > 1]
        device, sizes = "cuda" if "nccl" in dist.get_backend_config() else "cpu", tuple(map(self.degree, used))
        self.device_mesh: DeviceMesh = init_device_mesh(device, sizes, mesh_dim_names=tuple(used))
        for axis in used:
            group = self.device_mesh.get_group(axis)
            # Not the user's own group: a collective that times out leaves a group of gloo closed.
            self._groups[axis] = dist.new_group() if group is dist.group.WORLD and self.degree(axis) > 1 else group
        self._made += tuple(group for group in self._groups.values() if group is not dist.group.WORLD)

    def _agree(self) -> None:
        """Compare the meshes of all processes before groups are made: different groups would hang."""
        own = f"{self.shape} in the order {','.join(self.shape.axes)}"
        for rank, other in enumerate(all_gather_bytes(own.encode(), self.cpu_group)):
            if other != own.encode():
                raise InputError(
                    f"process {self.rank} has a mesh of {own}, process {rank} a mesh of {other.decode()}: all "
                    "processes must form one mesh. Pass the same degrees and order on each."
                )

    def degree(self, axis: str) -> int:
        """The degree of an axis. Raises InputError for an unknown axis."""
        return self.shape.degree(axis)

    def coordinate(self, axis: str) -> int:
        """The coordinate of this process on an axis. Raises InputError for an unknown axis."""
        check_axis(axis)
        return self.shape.coordinates(self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group along an axis through this process, on the backend of the default group.

        Raises:
            InputError: the axis is unknown, or has degree 1 and is not pp or dp; or the mesh is closed.
        """
        if axis in self._groups:
            return self._groups[axis]
        if self._is_closed:
            raise InputError(f"mesh {self} is closed: its groups are gone. Make a new Mesh, or close it last.")
        if axis in self.shape.axes and self.degree(axis) > 1:
            raise InputError(
                f"mesh {self} has no group along {axis}: a pipeline on it failed. Make a new mesh and new pipelines."
            )
        check_axis(axis)
        raise InputError(
            f"mesh axis {axis!r} has degree 1: only pp, dp and axes of a higher degree have a group. Use "
            'mesh.group("pp") or mesh.group("dp").'
        )

    def leave(self, axis: str) -> None:
        """Called after an error: closes the group of an axis, so that its other processes stop waiting for this one.

        With gloo they notice the closed connections. With NCCL they wait until their timeout.
        """
        if self._is_closed or axis not in self._groups or "nccl" in dist.get_backend_config(self._groups[axis]):
            return
        group = self._groups.pop(axis)
        if group is dist.group.WORLD:
            return
        self._made = tuple(made for made in self._made if made is not group)
        registry = getattr(self.device_mesh, "_pg_registry", {})
        for name in [name for name, registered in registry.items() if registered is group]:
            del registry[name]
        destroy_groups((group,))
        # Connections close with the last reference, which waits for collectives of gloo's threads that were begun.
        held = [group]
        del group
        threading.Thread(target=held.clear, name="pipeloom-leave", daemon=True).start()

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Ranks in the default group: all processes, in groups along an axis."""
        return self.shape.lines(axis)

    def close(self) -> None:
        """Destroy the groups of this mesh, with their threads and sockets; every process closes its mesh.

        Close its pipelines first. Needed where a process makes one mesh after another:
        ``torch.distributed.destroy_process_group()`` destroys the groups too. Closing twice does nothing.
        """
        destroy_groups(self._made)
        self._made, self._is_closed = (), True
        self._groups.clear()
        if hasattr(self, "device_mesh"):  # part of a reference cycle, which would keep the groups alive
            getattr(self.device_mesh, "_pg_registry", {}).clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # after an error, collectives with lost processes never end
            self.close()

    def __str__(self) -> str:
        return str(self.shape)
