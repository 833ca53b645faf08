"""What goes between the calls of a pipe's partitions, and the partitions themselves."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.autograd.auxiliary_losses import DeclaredLoss, ObservedQuantity
from pipeloom.pipe.calls.devices import Mark
from pipeloom.split.skippable import SkipKey


class Sent(NamedTuple):
    """A tensor between two calls.

    Attributes:
        tensor: without a graph.
        differentiable: whether a gradient comes back.
        ready: when it is complete on its device.
        overlaps: whether a change of it in place would change another value that goes between partitions.
    """

    tensor: Tensor
    differentiable: bool
    ready: Mark
    overlaps: bool = False


class Partition:
    """Consecutive layers on one device.

    Args:
        index: its position in the pipe.
        module: the layers.
        device: where they are.
        sent: the skips that its calls send to later partitions.
    """

    def __init__(self, index: int, module: nn.Sequential, device: torch.device, sent: Sequence[SkipKey]) -> None:
        self.index = index
        self.module = module
        self.device = device
        self.sent = list(sent)
        self.works_in_place: bool | None = None  # on its input; None: unknown
        self.buffers_checked = False
        self.checked: set[tuple[bool, int]] = set()  # modes in which its graph was examined

    @property
    def name(self) -> str:
        """The partition, its layers and its device, for messages."""
        names = list(self.module._modules)
        layers = f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]} to {names[-1]}"
        return f"partition {self.index} ({layers}) on {self.device}"


class Output(NamedTuple):
    """What a forward gives to the calls behind it and to the batch.

    Attributes:
        tensors: the value, flat.
        atomic: whether the value is a tensor rather than a tuple.
        skips: for later partitions; None stands for itself.
        losses: auxiliary losses that the layers declared, without graphs.
        observed: quantities that the layers declared.
    """

    tensors: list[Sent]
    atomic: bool
    skips: dict[SkipKey, Sent | None]
    losses: list[DeclaredLoss]
    observed: list[ObservedQuantity]


class InputGradients(NamedTuple):
    """What a backward gives to the calls before it: gradients of the value, of skips, of parameters, and when ready."""

    tensors: list[Tensor | None]
    skips: dict[SkipKey, Tensor | None]
    parameters: list[Tensor | None]
    ready: Mark


class OutputGradients:
    """What a backward starts from.

    Attributes:
        tensors: gradients of the value's tensors; None before they arrived.
        skips: of the skips that the call sent.
        losses: of the auxiliary losses that it declared.
        ready: when the gradients are complete, in the order of tensors, skips, losses.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor | None] | None = None
        self.skips: dict[SkipKey, tuple[Tensor | None, Mark]] = {}
        self.losses: list[Tensor | None] = []
        self.ready: Mark = None
