"""`MeshGroups`: the process groups of a `Mesh`, made by their members alone, closed at the end or after an error."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeloom.devices.communicators import without_splits
from pipeloom.errors import InputError
from pipeloom.parallel.mesh_shape import EXPERT_LINES, MeshShape, check_axis
from pipeloom.processes.collectives import destroy_groups, leave_group


class MeshGroups:
    """The groups of this process.

    Args:
        shape: of the mesh.
        rank: of this process, in the default group.

    Attributes:
        device_mesh: torch's ``DeviceMesh``, with the axes pp, dp and those of degrees above 1; None before `make`.
        is_closed: whether `close` was called.
    """

    def __init__(self, shape: MeshShape, rank: int) -> None:
        self._shape, self._rank = shape, rank
        self._made: tuple[dist.ProcessGroup, ...] = ()
        self._number = 0  # of the mesh, the same on every process
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._left: set[str] = set()  # names of groups that `leave` has closed
        self.device_mesh: DeviceMesh | None = None
        self.is_closed = False

    @without_splits()
    def make(self) -> None:
        """Make the groups along axes. Every process calls it."""
        used = [axis for axis in self._shape.axes if axis in ("pp", "dp") or self._shape.degree(axis) > 1]
        device, sizes = "cuda" if "nccl" in dist.get_backend_config() else "cpu", tuple(map(self._shape.degree, used))
        self.device_mesh = init_device_mesh(device, sizes, mesh_dim_names=tuple(used))
        self._number = distributed_c10d._world.group_count  # of all processes together, so far
        for axis in used:
            group, several = self.device_mesh.get_group(axis), self._shape.degree(axis) > 1
            # Not the user's own group: a collective that times out leaves a group of gloo closed.
            self._groups[axis] = dist.new_group() if group is dist.group.WORLD and several else group
        self._made += tuple(group for group in self._groups.values() if group is not dist.group.WORLD)

    def along(self, axis: str) -> dist.ProcessGroup:
        """The group along one axis of the mesh.

        Raises:
            InputError: the axis is unknown, or has degree 1 and is not pp or dp; or the mesh is closed.
        """
        if axis in self._groups:
            return self._groups[axis]
        self.check_open()
        if axis in self._shape.axes and self._shape.degree(axis) > 1:
            raise InputError(self._without(axis))
        check_axis(axis)
        raise InputError(
            f"mesh axis {axis!r} has degree 1: only pp, dp and axes of a higher degree have a group. Use "
            'mesh.group("pp") or mesh.group("dp").'
        )

    def along_all(self, axes: Sequence[str]) -> dist.ProcessGroup:
        """The group of all processes that differ from this one on `axes` alone; every process calls it."""
        used = [axis for axis in axes if self._shape.degree(axis) > 1] or list(axes[:1])
        if len(used) == 1 and used[0] not in EXPERT_LINES:
            return self.along(used[0])
        return self.of(self._shape.along_all(used, self._rank), "+".join(used))

    def of(self, line: Sequence[int], name: str | None = None) -> dist.ProcessGroup:
        """A group of these processes. Only they make it, so that set-up does not grow with the number of processes."""
        name = name or _name_of(line)
        if name not in self._groups:
            self.check_open()
            if name in self._left:  # the others may be gone
                raise InputError(self._without(name))
            self._groups[name] = self._new_group(sorted(line))
            self._made += (self._groups[name],)
        return self._groups[name]

    def second_of(self, line: Sequence[int]) -> dist.ProcessGroup:
        """Another group of these processes, for the second stream; made as `of` makes one."""
        return self.of(line, _second(_name_of(line)))

    @without_splits()
    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        """A group that its members alone make.

        torch names it by the ranks and by how many groups the process has. A later mesh has as many, and would find
        the addresses of a closed group in the store, so each mesh has keys of its own there.
        """
        whole, known = dist.group.WORLD, distributed_c10d._world.pg_map
        assert whole is not None
        backend, store = known[whole]
        known[whole] = backend, distributed_c10d.PrefixStore(f"mesh-{self._number}", store)
        try:
            group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        finally:
            known[whole] = backend, store
        return group

    def check_open(self) -> None:
        """Raises InputError after `close`."""
        if self.is_closed:
            raise InputError(
                f"mesh {self._shape} is closed: its process groups are closed too. Make a new Mesh, or close it last."
            )

    def leave(self, axes: Sequence[str]) -> None:
        """Close the group along axes, so that other processes stop waiting; with NCCL they wait until their timeout."""
        used = [axis for axis in axes if self._shape.degree(axis) > 1] or axes
        line = _name_of(self._shape.along_all(used, self._rank))
        for name in ("+".join(used), line, _second(line)):
            self._leave(name)

    def _leave(self, name: str) -> None:
        if self.is_closed or name not in self._groups or "nccl" in dist.get_backend_config(self._groups[name]):
            return
        group = self._groups.pop(name)
        self._left.add(name)
        if group is dist.group.WORLD:
            return
        self._made = tuple(made for made in self._made if made is not group)
        registry = getattr(self.device_mesh, "_pg_registry", {})
        for key in [key for key, registered in registry.items() if registered is group]:
            del registry[key]
        held = [group]
        del group
        leave_group(held)

    def close(self) -> None:
        """Destroy the groups, with their threads and sockets."""
        destroy_groups(self._made)
        self._made, self.is_closed = (), True
        self._groups.clear()
        # Part of a reference cycle, which would keep the groups alive.
        getattr(self.device_mesh, "_pg_registry", {}).clear()

    def _without(self, name: str) -> str:
        return (
            f"mesh {self._shape} has no group along {name}: a pipeline on it failed. Make a new mesh and new pipelines."
        )


def _second(name: str) -> str:
    return f"{name} in the second stream"


def _name_of(line: Sequence[int]) -> str:
    """The name of a group of ranks that is no axis of the mesh."""
    return ",".join(map(str, line))
