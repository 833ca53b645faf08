"""`Sharing`: how data-parallel replicas share work and memory; this one shares nothing."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.stores.blocks import Blocks
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.ir import DataAxis
from pipeloom.transport.values import Value


class RankModules(NamedTuple):
    """The modules of one rank.

    Attributes:
        stages: modules by stage.
        held: their parameters by canonical name.
        homes: by the same names, all stages with the parameter.
        layers: for every stage of the model, names of its layers.
    """

    stages: Mapping[int, nn.Module]
    held: Mapping[str, nn.Parameter]
    homes: Mapping[str, tuple[int, ...]]
    layers: Sequence[Sequence[str]]


class Sharing:
    """How data-parallel replicas share work and memory. This class: a single replica that shares nothing.

    Attributes:
        axis: the data axis; None for a single replica that computes with its main parameters.
        replica: index of this process's replica.
        replica_ranks: the processes with the same stages in all replicas; empty where there is one.
        sharded: whether replicas have different shards of main parameters.
        blocks: how the processes inside a stage share its parameters.
        terms: settings that must be equal on all processes, in addition to the program.
    """

    axis: DataAxis | None = None
    replica: int = 0
    replica_ranks: Sequence[int] = ()
    sharded: bool = False
    terms: Sequence[str] = ()

    def __init__(self, blocks: Blocks | None = None) -> None:
        self.blocks = Blocks() if blocks is None else blocks

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether norms count this replica's gradient of a main parameter: all shards do, of equal gradients one."""
        return True

    def check_device(self, device: torch.device) -> None:
        """Raises InputError where parameters cannot be offloaded from a model's device."""

    def store(self, rank: RankModules) -> ParameterStore:
        """The store of one rank."""
        return ParameterStore(rank.held, rank.stages.values())

    def sum_losses(self, loss: Tensor) -> Tensor:
        """The sum over replicas; every replica calls it."""
        return loss

    def leave(self) -> None:
        """Called after an error: notifies the other replicas and the processes inside the stage, which may wait."""
        self.blocks.leave()

    def inputs(self, value: Value) -> Value:
        """The model's inputs in the format of its parameters."""
        return value

    def loss_fn(self, loss_fn: LossFn | None) -> LossFn | None:
        """The loss of outputs in that format."""
        return loss_fn
