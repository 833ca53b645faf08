"""`ParameterStore`: the parameters of one rank, and `Sharing`: what data-parallel replicas share of them.

An optimizer updates *main parameters*. Without data parallelism and mixed precision these are the parameters of the
modules. Otherwise `pipeloom.parallel` keeps main parameters in addition to the modules' own: shards, or master
parameters in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.parameter_bytes import HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.ir import Action, DataAxis, Program
from pipeloom.transport.values import Value

LossFn = Callable[[Any, Any], Tensor]


class ParameterStore(ABC):
    """The parameters that one rank holds, and their gradients.

    Attributes:
        parameters: main parameters by canonical name; an optimizer changes them and reads their ``.grad``.
        ranges: of main parameters that do not have the parameter's shape: the elements that they hold.
        loss_scale: the factor of the loss before its backward; main gradients are divided by it.
        records_peaks: whether runs record the peak bytes of gradients, which takes some time.
        times: when the store's collectives ran.
    """

    parameters: Mapping[str, nn.Parameter]
    ranges: Mapping[str, Range]
    loss_scale: float = 1.0
    records_peaks: bool = False
    times: OverlapTimes

    @abstractmethod
    def begin(self, program: Program) -> None:
        """Called when a run of `program` begins."""

    @abstractmethod
    def bind(self, action: Action, program: Program) -> Step:
        """The function of an UNSHARD, a RESHARD, or a REDUCE_GRAD of the data axis."""

    @abstractmethod
    def around(self, action: Action, step: Step, program: Program) -> Step:
        """The function of a computation, with the parameters that it needs before and after it."""

    @abstractmethod
    def finish(self) -> None:
        """Called when all backwards of a run are done: waits for gradient reductions, and adds to main gradients."""

    @abstractmethod
    def end(self) -> None:
        """Called when a run is over, also after an error."""

    @abstractmethod
    def close(self) -> None:
        """Called when no run will follow."""

    @abstractmethod
    def value(self, name: str) -> Tensor:
        """A main parameter as a tensor that may be read and written; on the host where the parameter is offloaded."""

    @abstractmethod
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of full parameters into the main ones."""

    @abstractmethod
    def refresh(self) -> None:
        """Copy main parameters into the modules' parameters that exist between runs; every replica calls it."""

    @abstractmethod
    def held_bytes(self) -> HeldBytes:
        """The bytes held now."""

    @abstractmethod
    def peak_bytes(self) -> PeakBytes:
        """The peak of the last run."""

    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        """By stage, the bytes of each unit's full parameters when gathered, and of its gradients when reduced."""
        return {}

    @property
    def away(self) -> Offloaded:
        """Main parameters that are offloaded."""
        return Offloaded(0, 0, 0.0)

    def whole(self) -> dict[str, Tensor]:
        """Full main parameters by name, where they are not the modules' own; every replica calls it."""
        return {}

    def writable(self) -> AbstractContextManager[None]:
        """A context in which the modules' parameters may be written."""
        return nullcontext()


class PlainStore(ParameterStore):
    """Main parameters are the modules' own."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        self.parameters = parameters
        self._modules = list(modules)
        self.ranges = {}
        self.times = OverlapTimes()

    def begin(self, program: Program) -> None:
        pass

    def bind(self, action: Action, program: Program) -> Step:
        return (lambda: None), None

    def around(self, action: Action, step: Step, program: Program) -> Step:
        return step

    def finish(self) -> None:
        pass

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def held_bytes(self) -> HeldBytes:
        gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
        return HeldBytes.of(self._modules, self.parameters.values(), gradients)

    def peak_bytes(self) -> PeakBytes:  # gradients are only ever added to
        return PeakBytes(0, self.held_bytes().gradients if self.records_peaks else 0)

    def value(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def assign(self, values: Mapping[str, Tensor]) -> None:
        pass

    def refresh(self) -> None:
        pass


class Sharing:
    """What data-parallel replicas share. This class is for a single replica in one number format: it shares nothing.

    Attributes:
        axis: how replicas share the work; None for a single replica that computes with its main parameters.
        copy: index of this process's replica.
        sharded: whether replicas have different shards of main parameters.
        terms: in addition to the program, what all processes have to agree on.
    """

    axis: DataAxis | None = None
    copy: int = 0
    sharded: bool = False
    terms: Sequence[str] = ()

    def check_device(self, device: torch.device) -> None:
        """Raises InputError where parameters cannot be offloaded from a model's device."""

    def store(
        self,
        stages: Mapping[int, nn.Module],
        held: Mapping[str, nn.Parameter],
        homes: Mapping[str, tuple[int, ...]],
        layers: Sequence[Sequence[str]],
    ) -> ParameterStore:
        """The store of one rank.

        Args:
            stages: the modules of its stages.
            held: their parameters by canonical name.
            homes: by the same names, all stages with the parameter.
            layers: for every stage of the model, names of its layers.
        """
        return PlainStore(held, stages.values())

    def sum_samples(self, count: int, refusal: Exception | None = None) -> int:
        """The number of samples in the batches of all replicas; every replica calls it.

        Args:
            count: of this replica.
            refusal: the error, if this replica's batch is invalid.

        Raises:
            InputError: the batch of a replica is invalid. On that replica `refusal` is raised.
        """
        if refusal is not None:
            raise refusal
        return count

    def sum_losses(self, loss: Tensor) -> Tensor:
        """The sum over replicas; every replica calls it."""
        return loss

    def leave(self) -> None:
        """Called after an error: tells the other replicas, which may wait for this one."""

    def inputs(self, value: Value) -> Value:
        """The model's inputs in the format of its parameters."""
        return value

    def loss_fn(self, loss_fn: LossFn | None) -> LossFn | None:
        """The loss of outputs in that format."""
        return loss_fn
