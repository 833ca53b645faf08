"""`Unit`: parameters that are gathered, freed and reduced together, such as those of one layer or of several.

    module parameters      whole, in the format of forwards: see `module_memory`; zero3 frees them between uses
    main parameters        this copy's segment, in the format of updates: see `main_memory`
    gradients              see `unit_gradients`

Main parameters share the memory of the module's where formats are equal and nothing is freed. Under ddp without masters
they are the module's parameters themselves, and there is no other memory. Where they have memory of their own, that may
be a store: a gather then is a read of this copy's segment, and the collective.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.parameter_bytes import Gauge
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.ir import DataStrategy
from pipeloom.parallel.data.flat_layout import FlatLayout
from pipeloom.parallel.data.main_parameters import AwayMemory, HeldMemory, MainMemory, home_of
from pipeloom.parallel.data.module_parameters import ModuleMemory
from pipeloom.parallel.data.parameter_formats import Formats
from pipeloom.parallel.data.replica_group import ReplicaGroup, Wait, no_wait
from pipeloom.parallel.data.unit_gradients import UnitGradients, pieces, views
from pipeloom.parallel.offload.mover import Mover


class Unit:
    """Parameters of one number format on one device.

    Args:
        parameters: the module's, by canonical name.
        layout: how they lie one behind the other; one segment where copies do not have different ones.
        formats: of their numbers.
        strategy: who keeps what.
        copies: who shares them. Values are those of copy 0.
        gathered: counts the bytes that are gathered and will be freed.
        mover: to the store in which main parameters are between updates; None: they stay in memory.

    Attributes:
        main: main parameters by name.
        ranges: of those that do not have the parameter's shape.
        filled: whether module parameters have this run's values.
        gradients: of the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        formats: Formats,
        strategy: DataStrategy,
        copies: ReplicaGroup,
        gathered: Gauge,
        mover: Mover | None = None,
    ) -> None:
        self._gathered, self._mover = gathered, mover
        self.parameters = list(parameters.values())
        self._names = list(parameters)
        self._layout, self._formats, self._copies, self._strategy = layout, formats, copies, strategy
        self._segment = _own_segment(strategy, copies)
        self.main: dict[str, nn.Parameter] = dict(parameters)
        self.ranges: dict[str, Range] = {}
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._memory: ModuleMemory | None = None
        self._gathering: Wait | None = None
        self._reads = False
        self.filled = False
        self._take_over()
        self.gradients = UnitGradients(
            self.parameters, self.main, layout, formats.gradient, strategy, copies, self._segment
        )

    # Memory

    @torch.no_grad()
    def _take_over(self) -> None:
        """Move the parameters into flat memory, and make the main ones."""
        flat = self.parameters[0].new_zeros(self._layout.num_elements)
        views = self._views(flat)
        for view, parameter in zip(views, self.parameters, strict=True):
            view.copy_(parameter)
        self._copies.broadcast(flat)()
        formats, frees = self._formats, self._strategy is DataStrategy.ZERO3
        if self._strategy is DataStrategy.DDP and formats.compute == formats.main:
            for view, parameter in zip(views, self.parameters, strict=True):
                parameter.copy_(view)
            return
        own = flat[self._layout.segment(self._segment or 0)] if self._segment is not None else flat[:0]
        apart = formats.compute != formats.main or frees
        if apart:
            own = own.to(formats.main, copy=True)
        self._memory = ModuleMemory(
            self.parameters, self._layout, flat.to(formats.compute), frees=frees, gathered=self._gathered
        )
        self._make_main_parameters(own)
        self._main_dtype = own.dtype
        self._main: MainMemory = HeldMemory(own)
        if apart and self._mover is not None:  # on all copies alike, also where this one has no element
            self._main = AwayMemory(own, self.main.values(), self._mover, formats.compute, self._gathered)
            self._reads = True
        self.free()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return views(flat, self._layout, self._shapes)

    def _make_main_parameters(self, own: Tensor) -> None:
        formats = self._formats
        own_pieces, keeps_whole = pieces(own, self._layout, self._segment), self._layout.keeps_whole
        for index, (name, piece) in enumerate(zip(self._names, own_pieces, strict=True)):
            module_parameter, shape = self.parameters[index], self._shapes[index]
            start, stop = self._layout.piece(index, self._segment)
            if keeps_whole and stop - start == shape.numel():
                piece = piece.view(shape)
            else:
                self.ranges[name] = Range(start, stop, tuple(shape))
            main = nn.Parameter(piece, requires_grad=module_parameter.requires_grad)
            vars(main).update(vars(module_parameter))  # what users note on parameters, such as "no weight decay"
            if module_parameter.is_floating_point():
                module_parameter.grad_dtype = formats.gradient
                if formats.gradient != formats.main:
                    main.grad_dtype = None  # any: updates widen them, see `pipeloom.training.optimizer_step`
            self.main[name] = main

    # Parameters

    def start_gather(self) -> None:
        """Begin to give module parameters the values of the main ones; does not wait."""
        if self.filled or self._gathering is not None:
            return
        if self._memory is None:
            self.filled = True
            return
        self._memory.allocate()
        own = self._place
        arrive = self._awaited(self._main.fill(own)) if own is not None else no_wait
        if not self._collects:
            self._gathering = arrive
            return
        arrive()
        if self._strategy is DataStrategy.PARAMETER_SERVER:
            self._gathering = self._copies.broadcast(self._memory.flat)
        else:
            assert own is not None
            self._gathering = self._copies.all_gather(self._memory.flat, own)

    def _awaited(self, arrive: Wait) -> Wait:
        """A wait for a read counts as one."""
        if not self._reads:
            return arrive

        def wait() -> None:
            with self._copies.times.waiting():
                arrive()

        return wait

    @property
    def _place(self) -> Tensor | None:
        """This copy's segment of gathered memory."""
        if self._memory is None or self._segment is None:
            return None
        return self._memory.flat[self._layout.segment(self._segment)]

    @property
    def _collects(self) -> bool:
        """Whether a gather is a collective."""
        return self._copies.degree > 1 and self._strategy is not DataStrategy.DDP

    @property
    def waits_for_reads(self) -> bool:
        """Whether `start_gather` waits until a read is done, with which `prefetch` begins."""
        return self._reads and self._collects

    def prefetch(self) -> None:
        """Begin with what a gather has to wait for before it can start; does not wait."""
        if self.waits_for_reads and not self.filled and self._gathering is None:
            assert self._memory is not None
            self._main.prefetch(self._place if self._memory.is_there else None)

    def wait(self) -> None:
        """Module parameters have their values when it returns."""
        if self.filled:
            return
        self.start_gather()
        if self._gathering is not None:
            self._gathering()
            self._gathering = None
            assert self._memory is not None
            self._memory.show()
            self.filled = True

    def make_writable(self) -> None:
        """Until they are freed, values may be written into module parameters."""
        if self._memory is not None:
            self._memory.allocate()
            self._memory.show()

    def free(self) -> None:
        """Let go of what was gathered (zero3); waits for a gather on its way."""
        if self._memory is None or not self._memory.frees:
            return
        gathering, self._gathering = self._gathering, None
        self._main.drop()
        try:
            if gathering is not None:
                gathering()
        finally:
            self._memory.free()
            self.filled = False

    def stale(self) -> None:
        """Main parameters may have changed."""
        self.filled = False
        if self._memory is not None:
            self._main.drop()

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """Of all parameters when they are gathered, and of their gradients when they are reduced."""
        elements, formats = self._layout.num_elements, self._formats
        return elements * formats.compute.itemsize, elements * formats.gradient.itemsize

    @property
    def trains(self) -> bool:
        """Whether there will be gradients."""
        return any(parameter.requires_grad for parameter in self.parameters)

    # Values

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Values of whole parameters in the format of updates, in new memory; every copy calls it."""
        if self._memory is None:
            return {}
        flat = self._memory.flat.new_empty(self._layout.num_elements, dtype=self._main_dtype)
        own = flat[self._layout.segment(self._segment)] if self._segment is not None else flat[:0]
        self._main.copy_to(own)
        if self._strategy is DataStrategy.PARAMETER_SERVER:
            self._copies.broadcast(flat)()
        elif self._strategy is not DataStrategy.DDP:
            self._copies.all_gather(flat, own)()
        return dict(zip(self._names, self._views(flat), strict=True))

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of whole parameters into the main ones."""
        if self._memory is None:
            return
        for index, (name, main) in enumerate(self.main.items()):
            start, stop = self._layout.piece(index, self._segment)
            value, home = values[name].reshape(-1)[start:stop].view(main.shape), home_of(main)
            main.copy_(value) if home is None else home.write(value)


def _own_segment(strategy: DataStrategy, copies: ReplicaGroup) -> int | None:
    """Which segment this copy updates."""
    match strategy:
        case DataStrategy.DDP:
            return 0
        case DataStrategy.PARAMETER_SERVER:
            return 0 if copies.index == 0 else None
        case _:
            return copies.index
