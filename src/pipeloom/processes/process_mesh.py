"""What a pipeline needs to know of the processes that it shares with copies of itself."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist


class ProcessMesh(Protocol):
    """All processes of a run on named axes, pp and dp among them; `pipeloom.parallel.Mesh` is one.

    Attributes:
        cpu_group: gloo, over all processes in the order of their ranks in the default group.
    """

    cpu_group: dist.ProcessGroup

    def degree(self, axis: str) -> int:
        """How many places an axis has."""

    def coordinate(self, axis: str) -> int:
        """Where this process stands on an axis."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes along an axis through this one, in its order."""

    def leave(self, axis: str) -> None:
        """This process failed, and those along an axis may wait for it: let them know. The axis has no group then."""

    def lines(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Ranks in the default group: all processes, in groups along an axis."""
