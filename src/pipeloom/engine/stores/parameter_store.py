"""`ParameterStore`: the parameters of one rank and their bytes. `Sharing`: how data-parallel replicas share them.

An optimizer updates *main parameters*. Without data parallelism and mixed precision these are the parameters of the
modules. Otherwise `pipeloom.parallel` keeps main parameters in addition to the modules' own: shards, or master
parameters in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import LossFn, Step
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.ir import Action, DataAxis, Program
from pipeloom.transport.values import Value


class HeldBytes(NamedTuple):
    """Bytes held at one moment.

    Attributes:
        parameters: of modules; of sharded ones those that are gathered.
        masters: of main parameters with their own memory: master parameters, shards.
        gradients: of modules and of main parameters, and of gradients in reduction.
    """

    parameters: int
    masters: int
    gradients: int

    @classmethod
    def of(cls, modules: Iterable[nn.Module], main: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> HeldBytes:
        """Counted storage by storage, each once and as the first kind that has it."""
        seen: set[int] = set()
        counts = []
        for tensors in ((p for module in modules for p in module.parameters()), main, gradients):
            storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in tensors) if s._cdata not in seen}
            seen |= storages.keys()
            counts.append(sum(storage.nbytes() for storage in storages.values()))
        return cls(*counts)


class PeakBytes(NamedTuple):
    """Peak bytes of the last run.

    Attributes:
        gathered: of gathered parameters that are freed again (zero3).
        gradients: as `HeldBytes.gradients`; 0 where peaks are not recorded.
    """

    gathered: int
    gradients: int


class Offloaded(NamedTuple):
    """Offloaded main parameters.

    Attributes:
        num_bytes: of these parameters.
        moved_bytes: bytes read and written so far.
        wait_seconds: how long gathers have waited for reads so far.
    """

    num_bytes: int
    moved_bytes: int
    wait_seconds: float


class Gauge:
    """A number of bytes and its peak.

    Attributes:
        now, peak: in bytes.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0

    def restart(self) -> None:
        """Start a new peak at the current value."""
        self.peak = self.now

    def add(self, change: int) -> None:
        """Add `change` bytes, which may be negative."""
        self.set(self.now + change)

    def set(self, value: int) -> None:
        """Set the number."""
        self.now = value
        self.peak = max(self.peak, value)


class ParameterStore:
    """The parameters of one rank, and their gradients. In this class, main parameters are the modules' own.

    Attributes:
        parameters: main parameters by canonical name; an optimizer changes them and reads their ``.grad``.
        ranges: of main parameters that do not have the parameter's shape: the elements that they hold.
        loss_scale: the factor of the loss before its backward; main gradients are divided by it.
        records_peaks: whether runs record the peak bytes of gradients, which takes some time.
        times: when the store's collectives ran.
    """

    ranges: Mapping[str, Range] = MappingProxyType({})
    loss_scale: float = 1.0
    records_peaks: bool = False

    def __init__(self, parameters: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        self.parameters = parameters
        self._modules = list(modules)
        self.times = OverlapTimes()

    def begin(self, program: Program) -> None:
        """Called when a run of `program` begins."""

    def bind(self, action: Action, program: Program) -> Step:
        """The function of an UNSHARD, a RESHARD, or a REDUCE_GRAD of the data axis."""
        return (lambda: None), None

    def around(self, action: Action, step: Step, program: Program) -> Step:
        """The function of a computation, which also waits for the parameters that it reads."""
        return step

    def finish(self) -> None:
        """Called when all backwards of a run are done: waits for reductions, and adds them to main gradients."""

    def end(self) -> None:
        """Called when a run is over, also after an error."""

    def close(self) -> None:
        """Called when no run will follow."""

    def value(self, name: str) -> Tensor:
        """A main parameter as a tensor that may be read and written; on the host where the parameter is offloaded."""
        return self.parameters[name].detach()

    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of full parameters into the main ones."""

    def refresh(self) -> None:
        """Copy main parameters into the modules' parameters that exist between runs; every replica calls it."""

    def held_bytes(self) -> HeldBytes:
        """The bytes held now."""
        gradients = (p.grad for p in self.parameters.values() if p.grad is not None)
        return HeldBytes.of(self._modules, self.parameters.values(), gradients)

    def peak_bytes(self) -> PeakBytes:
        """The peak of the last run. Without replicas, gradients only grow until its end."""
        return PeakBytes(0, self.held_bytes().gradients if self.records_peaks else 0)

    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        """By stage, the bytes of each unit's full parameters when gathered, and of its gradients when reduced."""
        return {}

    @property
    def offloaded(self) -> Offloaded:
        """Bytes and transfers of offloaded main parameters."""
        return Offloaded(0, 0, 0.0)

    def whole(self) -> dict[str, Tensor]:
        """Full main parameters by name, where they are not the modules' own; every replica calls it."""
        return {}

    def writable(self) -> AbstractContextManager[None]:
        """A context in which the modules' parameters may be written."""
        return nullcontext()


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
        sharded: whether replicas have different shards of main parameters.
        terms: settings that must be equal on all processes, in addition to the program.
    """

    axis: DataAxis | None = None
    replica: int = 0
    sharded: bool = False
    terms: Sequence[str] = ()

    def check_device(self, device: torch.device) -> None:
        """Raises InputError where parameters cannot be offloaded from a model's device."""

    def store(self, rank: RankModules) -> ParameterStore:
        """The store of one rank."""
        return ParameterStore(rank.held, rank.stages.values())

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
        """Called after an error: notifies the other replicas, which may wait for this one."""

    def inputs(self, value: Value) -> Value:
        """The model's inputs in the format of its parameters."""
        return value

    def loss_fn(self, loss_fn: LossFn | None) -> LossFn | None:
        """The loss of outputs in that format."""
        return loss_fn
