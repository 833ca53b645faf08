"""Measured times of layers on one process, as times where several processes share each stage. No torch here.

    block         divided as its arithmetic is, see `stage_times`: between the processes of a stage; key heads that
                  several processes have, and what rings of equal ranges compute more, count for each
    head          divided by all processes
    other layers  divided by the processes that share the tokens or samples between blocks

To these times collectives are added, without what passes while the device computes. A device computes as fast as the
measured block.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from pipeloom.parallel.inside_stage import InsideStage, StageTraffic
from pipeloom.parallel.traffic import Traffic
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork
from pipeloom.plan.stage_times import StageTimes

ELEMENT = 4  # bytes of a number: layers are measured in float32
NO_LIMIT = 1e30


class Shared(NamedTuple):
    """How the time of a layer changes.

    Attributes:
        part: the fraction of the computation that a process has.
        forward, backward: seconds of collectives to add.
    """

    part: float
    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedLayers:
    """The layers of a transformer on one of the processes that share a stage.

    Attributes:
        model: the sizes.
        inside: the processes.
        bytes_per_second: bandwidth of one process to the others.
        latency_seconds: latency of a message between them.
        samples: per micro-batch, all processes together.
    """

    model: Architecture
    inside: InsideStage
    bytes_per_second: float
    latency_seconds: float = 0.0
    samples: int = 1

    def check(self) -> None:
        """Raises InputError where sizes cannot be shared."""
        self.inside.check(self.model.layer_sizes(self.samples, ELEMENT))

    def block(self, forward_seconds: float, *, experts: bool = False) -> Shared:
        """A block, with experts in place of an MLP or without, that takes `forward_seconds` on one process."""
        alone = replace(self._times(1.0, free=True), inside=InsideStage()).block(experts=experts).forward
        rate = alone / forward_seconds if forward_seconds > 0 else NO_LIMIT
        free, real = (self._times(rate, free=each).block(experts=experts) for each in (True, False))
        part = free.forward * rate / alone
        return Shared(part, max(0.0, real.forward - free.forward), max(0.0, real.backward_input - free.backward_input))

    def collectives(self) -> tuple[float, float]:
        """Seconds of the collectives of a block, forward and backward, hidden ones included."""
        experts = self.model.experts is not None and all(map(self.model.has_experts, range(self.model.layers)))
        return self._times(NO_LIMIT).collectives(self._traffic.block(experts=experts))

    def embedding(self) -> Shared:
        return self._with(self._traffic.embedding(), self.message_part)

    def norm(self) -> Shared:
        """The norm behind the blocks."""
        return self._with(self._traffic.norm(), self.message_part)

    def head(self) -> Shared:
        """The last layer, and the loss."""
        return self._with(self._traffic.head(), 1 / self.inside.processes)

    @property
    def message_part(self) -> float:
        """The fraction of the activations between blocks that a process has, and sends to the next stage."""
        inside = self.inside
        return 1 / (inside.context * (inside.tensor if inside.sequence or inside.grid else 1))

    @property
    def _traffic(self) -> StageTraffic:
        return self.inside.traffic(self.model.layer_sizes(self.samples, ELEMENT))

    def _with(self, traffic: Traffic, part: float) -> Shared:
        return Shared(part, *self._times(NO_LIMIT).collectives(traffic))

    def _times(self, operations_per_second: float, *, free: bool = False) -> StageTimes:
        rate, latency = (NO_LIMIT, 0.0) if free else (self.bytes_per_second, self.latency_seconds)
        device = Device(
            name="measured",
            operations_per_second=operations_per_second,
            memory_bytes_per_second=NO_LIMIT,
            launch_seconds=0.0,
        )
        cluster = Cluster(
            name="measured",
            devices_per_node=self.inside.processes,
            device=device,
            inside_node=NodeLinks(bytes_per_second=rate, pair_bytes_per_second=rate, latency_seconds=latency),
            between_nodes=NodeNetwork(bytes_per_second=rate, latency_seconds=latency),
            efficiency=1.0,
        )
        return StageTimes(model=self.model, inside=self.inside, cluster=cluster, samples=self.samples, element=ELEMENT)
