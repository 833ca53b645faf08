"""`Configuration`: how a transformer is trained on the devices of a cluster. No torch here."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeloom.common.division import even_parts
from pipeloom.errors import InputError
from pipeloom.ir.data_axis import DataAxis, DataStrategy, Granularity
from pipeloom.ir.recompute import Recompute
from pipeloom.parallel import Precision
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.costs.links import ORDER, strides


class Configuration(NamedTuple):
    """All degrees and options on which the costs of a step depend, as keywords.

    A search makes and compares very many of them: a named tuple is the fastest.

    Attributes:
        schedule: name of the schedule.
        pipeline: ranks of the pipeline.
        chunks: virtual stages per rank.
        microbatches: per step and replica.
        microbatch_size: samples per micro-batch.
        slices: per micro-batch.
        data: data-parallel degree.
        strategy, granularity: of data parallelism.
        inside: the processes that share a stage.
        recompute: activation recomputation, of all stages or of each.
        precision: number formats.
        optimizer: a name of `pipeloom.plan.memory.OPTIMIZERS`.
        blocks: per stage; None: even.
        order: mesh axes, outermost first.
        imbalance: load of the busiest expert-parallel process over the mean load.
        offload: activations that a rank keeps while it offloads others, 0: as few as possible; None: it offloads none.
        offload_states: whether the optimizer's states are offloaded between updates.
    """

    schedule: str = "1f1b"
    pipeline: int = 1
    chunks: int = 1
    microbatches: int = 1
    microbatch_size: int = 1
    slices: int = 1
    data: int = 1
    strategy: DataStrategy = DataStrategy.DDP
    granularity: Granularity = Granularity.STEP
    inside: InsideStage = InsideStage()
    recompute: Recompute | Sequence[Recompute] = Recompute.NONE
    precision: Precision = Precision("bf16")
    optimizer: str = "adamw"
    blocks: tuple[int, ...] | None = None
    order: tuple[str, ...] = ORDER
    imbalance: float = 1.0
    offload: int | None = None
    offload_states: bool = False

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks if self.blocks is None else len(self.blocks)

    @property
    def devices(self) -> int:
        """The number of devices of all replicas."""
        return self.pipeline * self.inside.processes * self.data

    @property
    def batch_size(self) -> int:
        """Samples per step, of all replicas."""
        return self.data * self.microbatches * self.microbatch_size

    @property
    def element(self) -> int:
        """Bytes of a number in forwards."""
        return 2 if self.precision.has_masters else 4

    @property
    def replicas(self) -> int:
        """Processes with the same parameters, along dp and cp."""
        return self.data * self.inside.context

    @property
    def strides(self) -> dict[str, int]:
        """Devices from one process to the next along each mesh axis."""
        inside = self.inside
        degrees = {"dp": self.data, "pp": self.pipeline, "cp": inside.context, "tp": inside.tensor}
        return strides(degrees, self.order)

    @property
    def tensor_stride(self) -> int:
        """Devices from one tensor-parallel process to the next."""
        return 1 if self.order[-1] == "tp" else self.strides["tp"]

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute if isinstance(self.recompute, Recompute) else self.recompute[stage]

    def data_axis(self, strategy: DataStrategy | None = None, granularity: Granularity | None = None) -> DataAxis:
        """The replicas of parameters, with another strategy and granularity where they are given."""
        kind = strategy or self.strategy, granularity or self.granularity
        return _data_axis(self.replicas, *kind, self.precision.has_masters)

    def blocks_of(self, layers: int) -> list[int]:
        """Blocks of every stage. Where there are more stages than blocks, the first has none, then the last.

        Raises:
            InputError: more stages than blocks, embedding and head together, or `blocks` that do not add up.
        """
        if self.blocks is None:
            return even_blocks(layers, self.stages)
        if sum(self.blocks) != layers or min(self.blocks) < 0:
            raise InputError(
                f"blocks={','.join(map(str, self.blocks))}: must add up to the {layers} layers. Change them."
            )
        return list(self.blocks)


@lru_cache(maxsize=1024)
def _data_axis(degree: int, strategy: DataStrategy, granularity: Granularity, has_masters: bool) -> DataAxis:
    return DataAxis(degree=degree, strategy=strategy, granularity=granularity, separate_master=has_masters)


def even_blocks(layers: int, stages: int) -> list[int]:
    """Blocks of every stage, as `Configuration.blocks_of`."""
    if stages <= layers:
        return even_parts(layers, stages)
    if stages > layers + 2:
        raise InputError(f"{stages} stages for {layers} layers: must be at most {layers + 2}. Use fewer chunks.")
    return [0, *[1] * (stages - 2), 1 if stages == layers + 1 else 0]
