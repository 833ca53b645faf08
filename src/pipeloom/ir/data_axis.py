"""`DataAxis`: data parallelism of a program, and what each strategy shards.

Every data-parallel replica runs the same program on its own micro-batches. Strategies differ in what a replica holds
between and during steps:

    strategy            parameters    gradients     optimizer      after the backwards      before the forwards
    ddp                 full          full          full           all-reduce               -
    parameter-server    full          full          on replica 0   reduce to replica 0      broadcast
    zero1               full          full          a shard        reduce-scatter           all-gather
    zero2               full          a shard       a shard        reduce-scatter           all-gather
    zero3               a shard       a shard       a shard        reduce-scatter           all-gather

Sources: ZeRO, arXiv:1910.02054, sections 5 and 7; parameter server, OSDI'14 (Li et al.).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError


class DataStrategy(StrEnum):
    """How data-parallel replicas shard parameters, gradients and optimizer states."""

    DDP = "ddp"
    PARAMETER_SERVER = "parameter-server"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"

    @property
    def stage(self) -> int:
        """The ZeRO stage: 0 shards nothing, 1 the optimizer, 2 gradients as well, 3 parameters as well."""
        match self:
            case DataStrategy.DDP:
                return 0
            case DataStrategy.PARAMETER_SERVER | DataStrategy.ZERO1:
                return 1
            case DataStrategy.ZERO2:
                return 2
            case DataStrategy.ZERO3:
                return 3
            case _:
                assert_never(self)

    @property
    def has_server(self) -> bool:
        """Whether replica 0 updates all parameters for the other replicas."""
        match self:
            case DataStrategy.PARAMETER_SERVER:
                return True
            case DataStrategy.DDP | DataStrategy.ZERO1 | DataStrategy.ZERO2 | DataStrategy.ZERO3:
                return False
            case _:
                assert_never(self)

    @property
    def shards_optimizer(self) -> bool:
        """Whether a replica updates only a shard of the parameters that it computes with."""
        return self.stage >= 1

    @property
    def shards_gradients(self) -> bool:
        return self.stage >= 2

    @property
    def shards_parameters(self) -> bool:
        return self.stage >= 3


class Granularity(StrEnum):
    """How long a rank keeps gathered parameters of a stage, and accumulates gradients before it reduces them.

    Each value needs less memory and more communication than the one before.
    """

    STEP = "step"  # from the start of a step to the stage's last computation; gradients are reduced once
    CHUNK = "chunk"  # for consecutive computations of one stage in the rank's order
    MICROBATCH = "microbatch"  # for one computation, bucket by bucket inside it


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxis:
    """The data-parallel degree and what each replica holds.

    Attributes:
        degree: the number of data-parallel replicas.
        strategy: what is sharded.
        granularity: of all-gathers (zero3) and gradient reductions (zero2, zero3); other strategies need "step".
        separate_master: whether the optimizer updates other tensors than the forward reads, such as float32 masters of
            16-bit parameters. UNSHARD then copies the masters, even if no parameter is gathered.

    Raises:
        InputError: a degree below 1, or a granularity that the strategy does not support.
    """

    degree: int
    strategy: DataStrategy = DataStrategy.DDP
    granularity: Granularity = Granularity.STEP
    separate_master: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.degree < 1:
            raise InputError(f"degree={self.degree}: the data-parallel degree must be at least 1.")
        if self.granularity is not Granularity.STEP and not self.strategy.shards_gradients:
            raise InputError(
                f"granularity={self.granularity.value!r}: strategy {self.strategy.value!r} gathers and reduces once "
                "per step. Use 'step', or strategy zero2 or zero3."
            )

    @property
    def unshards(self) -> bool:
        """Whether parameters are gathered, or copied from masters, before a step computes with them."""
        return self.strategy.shards_optimizer or self.separate_master
