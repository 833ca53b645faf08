"""Where parameters and gradients live: what a pipeline and its workers need to know of it.

An optimizer updates *main parameters*. Of a pipeline that runs alone these are the parameters of its modules. Where
copies of a pipeline share them, or forwards read other formats than updates write, `pipeloom.parallel` keeps main
parameters beside the modules' own: shards, or masters in float32.
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
        ranges: of those that do not have the parameter's shape.
        loss_scale: by what the loss was multiplied before its backward; main gradients are divided by it.
        records_peaks: whether runs look how many bytes gradients take, which takes some time.
        times: where it notes its collectives.
    """

    parameters: Mapping[str, nn.Parameter]
    ranges: Mapping[str, Range]
    loss_scale: float = 1.0
    records_peaks: bool = False
    times: OverlapTimes

    @abstractmethod
    def begin(self, program: Program) -> None:
        """A run of `program` begins."""

    @abstractmethod
    def bind(self, action: Action, program: Program) -> Step:
        """The function of an UNSHARD, a RESHARD, or a REDUCE_GRAD of the data axis."""

    @abstractmethod
    def around(self, action: Action, step: Step, program: Program) -> Step:
        """The function of a computation, with what it needs of the parameters before and behind it."""

    @abstractmethod
    def finish(self) -> None:
        """All backwards of a run are done: wait for sums over copies, and add them to main gradients. Once a run."""

    @abstractmethod
    def end(self) -> None:
        """The run is over, or failed."""

    @abstractmethod
    def close(self) -> None:
        """No run will come."""

    @abstractmethod
    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        """For each stage, the bytes of each unit when it is gathered, and when its gradients are reduced."""

    @abstractmethod
    def held_bytes(self) -> HeldBytes:
        """What is held now."""

    @abstractmethod
    def peak_bytes(self) -> PeakBytes:
        """The most that the last run held."""

    @property
    def away(self) -> Offloaded:
        """Main parameters that are in a store."""
        return Offloaded(0, 0, 0.0)

    @abstractmethod
    def value(self, name: str) -> Tensor:
        """A main parameter as a tensor that may be read and written, on the host where it is in a store."""

    @abstractmethod
    def whole(self) -> dict[str, Tensor]:
        """Values of all parameters whose modules have other ones; every copy calls it."""

    @abstractmethod
    def writable(self) -> AbstractContextManager[None]:
        """Within it the modules' parameters may be written."""

    @abstractmethod
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of whole parameters into the main ones."""

    @abstractmethod
    def refresh(self) -> None:
        """Put main parameters into the modules, where they stay between runs; every copy calls it."""


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

    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    def held_bytes(self) -> HeldBytes:
        gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
        return HeldBytes.of(self._modules, self.parameters.values(), gradients)

    def peak_bytes(self) -> PeakBytes:  # gradients are only ever added to
        return PeakBytes(0, self.held_bytes().gradients if self.records_peaks else 0)

    def value(self, name: str) -> Tensor:
        return self.parameters[name].detach()

    def whole(self) -> dict[str, Tensor]:
        return {}

    def writable(self) -> AbstractContextManager[None]:
        return nullcontext()

    def assign(self, values: Mapping[str, Tensor]) -> None:
        pass

    def refresh(self) -> None:
        pass


class Sharing:
    """What a pipeline that runs alone has in common with other copies of itself: nothing.

    Attributes:
        axis: how copies share the work; None where there is one, which computes with its main parameters.
        copy: which one this process belongs to.
        sharded: whether copies have different parts of main parameters.
        terms: what all processes have to agree on beside the program.
    """

    axis: DataAxis | None = None
    copy: int = 0
    sharded: bool = False
    terms: Sequence[str] = ()

    def check_device(self, device: torch.device) -> None:
        """Raises InputError where what is shared cannot be on a model's device."""

    def store(
        self,
        stages: Mapping[int, nn.Module],
        held: Mapping[str, nn.Parameter],
        homes: Mapping[str, tuple[int, ...]],
        layers: Sequence[Sequence[str]],
    ) -> ParameterStore:
        """Take over the parameters of one rank.

        Args:
            stages: the modules of its stages.
            held: their parameters by canonical name.
            homes: by the same names, all stages with the parameter.
            layers: for every stage of the model, names of its layers.
        """
        return PlainStore(held, stages.values())

    def sum_samples(self, count: int, refusal: Exception | None = None) -> int:
        """The number of samples in the batches of all copies; every copy calls it.

        Args:
            count: of this copy.
            refusal: why it does not take its batch.

        Raises:
            InputError: a copy does not take its batch. On that copy its `refusal`.
        """
        if refusal is not None:
            raise refusal
        return count

    def sum_losses(self, loss: Tensor) -> Tensor:
        """The sum over copies; every copy calls it."""
        return loss

    def leave(self) -> None:
        """This copy takes part in nothing more: have the others, who may wait for it, know."""

    def inputs(self, value: Value) -> Value:
        """The model's inputs in the format of its parameters."""
        return value

    def loss_fn(self, loss_fn: LossFn | None) -> LossFn | None:
        """The loss of outputs in that format."""
        return loss_fn
