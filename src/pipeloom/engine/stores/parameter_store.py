"""`ParameterStore`: the parameters of one rank, their gradients and their bytes.

An optimizer updates *main parameters*. Without data parallelism and mixed precision these are the parameters of the
modules. Otherwise `pipeloom.parallel` keeps main parameters in addition to the modules' own: shards, or master
parameters in float32.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.held_bytes import HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.ir import Action, Program


class ParameterStore:
    """The parameters of one rank, and their gradients. In this class, main parameters are the modules' own.

    Attributes:
        parameters: main parameters by canonical name; an optimizer changes them and reads their ``.grad``.
        ranges: of main parameters that do not have the parameter's shape: the elements that they hold.
        loss_scale: the factor of the loss before its backward; main gradients are divided by it.
        gathers_in_place: whether gathers copy nothing, because replicas share the memory of full parameters.
        records_peaks: whether runs record the peak bytes of gradients, which takes some time.
        times: when the store's collectives ran.
    """

    ranges: Mapping[str, Range] = MappingProxyType({})
    loss_scale: float = 1.0
    gathers_in_place: bool = False
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
        """By stage, the bytes of each unit's full parameters when gathered, and of its gradients when reduced.

        Experts that no other replica shares are left out. Those that some share count as what all replicas would send.
        """
        return {}

    @property
    def offloaded(self) -> Offloaded:
        """Bytes and transfers of offloaded main parameters."""
        return Offloaded(0, 0, 0.0)

    def gradient_dtype(self, name: str) -> torch.dtype:
        """The dtype of the gradient of a main parameter."""
        return self.parameters[name].dtype

    def units(self) -> Iterator[Mapping[str, Tensor]]:
        """Full main parameters by name, unit by unit, where they are not the modules' own; every replica iterates."""
        return iter(())

    def writable(self) -> AbstractContextManager[None]:
        """A context in which the modules' parameters may be written."""
        return nullcontext()
