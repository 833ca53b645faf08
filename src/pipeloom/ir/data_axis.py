"""`DataAxis`: how copies of a pipeline share the work of one step, and what of the parameters each copy keeps.

Every copy runs the same program on micro-batches of its own. What differs between strategies is who holds parameters,
gradients and optimizer states between and during steps:

    strategy            parameters    gradients     optimizer      after the backwards      before the forwards
    ddp                 whole         whole         whole          all-reduce               -
    parameter-server    whole         whole         on copy 0      reduce to copy 0         broadcast
    zero1               whole         whole         a shard        reduce-scatter           all-gather
    zero2               whole         a shard       a shard        reduce-scatter           all-gather
    zero3               a shard       a shard       a shard        reduce-scatter           all-gather

Sources: ZeRO, arXiv:1910.02054, sections 5 and 7; parameter server, OSDI'14 (Li et al.).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError


class DataStrategy(StrEnum):
    """What copies of a pipeline keep of its parameters, gradients and optimizer states."""

    DDP = "ddp"
    PARAMETER_SERVER = "parameter-server"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


class Granularity(StrEnum):
    """For how long a rank holds what it gathered of a stage's parameters, and sums up gradients before it shares them.

    Each needs less memory than the one before, and more communication.
    """

    STEP = "step"  # from the start of a step to the stage's last computation; gradients are reduced once
    CHUNK = "chunk"  # for a run of computations of one stage that stand one behind the other in the rank's order
    MICROBATCH = "microbatch"  # for every computation, bucket after bucket inside it


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAxis:
    """How many copies of a pipeline there are, and what each keeps.

    Attributes:
        degree: the number of copies.
        strategy: who keeps what.
        granularity: of gathering (zero3) and of reducing gradients (zero2, zero3); other strategies have "step".
        separate_master: whether an update changes other memory than the forwards read, such as float32 masters of
            16-bit parameters: then parameters are unsharded, which is a copy, also where nothing is gathered.

    Raises:
        InputError: a degree below 1, or a granularity that the strategy does not have.
    """

    degree: int
    strategy: DataStrategy = DataStrategy.DDP
    granularity: Granularity = Granularity.STEP
    separate_master: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.degree < 1:
            raise InputError(f"a data axis of degree {self.degree}: it has at least one copy; give 1 or more")
        if self.granularity is not Granularity.STEP and not self.shards_gradients:
            raise InputError(
                f"granularity {self.granularity.value!r} with strategy {self.strategy.value!r}, which gathers and "
                "reduces once a step: it is for zero2 and zero3; leave it out"
            )

    @property
    def shards_optimizer(self) -> bool:
        """Whether a rank updates only a part of the parameters that it computes with."""
        return self.strategy is not DataStrategy.DDP

    @property
    def shards_gradients(self) -> bool:
        return self.strategy in (DataStrategy.ZERO2, DataStrategy.ZERO3)

    @property
    def shards_parameters(self) -> bool:
        return self.strategy is DataStrategy.ZERO3

    @property
    def unshards(self) -> bool:
        """Whether parameters have to be put together, or copied, before a step computes with them."""
        return self.shards_optimizer or self.separate_master
