"""`ReplicaGroups`: the replicas of every parameter.

dense parameters    all replicas, along axes dp and cp
experts             under expert parallelism, the replicas with the same experts: their number may be 1
"""

from torch import nn

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.parallel.data.replica_group import EXPERT_REPLICA_AXES, ReplicaGroup
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.placed import EXPERTS, is_expert


class ReplicaGroups:
    """The groups of replicas of one process. Without expert parallelism there is one.

    Args:
        mesh: of all processes; None: one replica.
        timeout_seconds: see `ReplicaGroup`.

    Attributes:
        every: all replicas.
        experts: those with the same experts as this process; `every` where experts are not divided.
        meet_in_backwards: whether replicas also communicate inside backwards, about tokens.
    """

    def __init__(self, mesh: Mesh | None, timeout_seconds: float) -> None:
        self.every = self.experts = ReplicaGroup(mesh, timeout_seconds)
        if mesh is not None and mesh.degree(EXPERTS) > 1:
            self.experts = ReplicaGroup(mesh, timeout_seconds, EXPERT_REPLICA_AXES)
        self.meet_in_backwards = mesh is not None and max(map(mesh.degree, (EXPERTS, "cp"))) > 1

    def of(self, parameter: nn.Parameter) -> ReplicaGroup:
        """The replicas that have the same values of a parameter, or of its main parameter."""
        return self.experts if self.experts is not self.every and is_expert(parameter) else self.every

    def record(self, times: OverlapTimes) -> None:
        """Have `times` record gathers and reductions."""
        self.every.times = self.experts.times = times

    def end_run(self) -> None:
        """Called when a run is over on this replica."""
        for group in {self.every, self.experts}:
            group.end_run()

    def leave(self) -> None:
        """Called after an error; see `ReplicaGroup.leave`."""
        self.every.leave()
        if self.experts is not self.every:
            self.experts.leave()
