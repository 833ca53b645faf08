"""`Unit`: parameters that are gathered, freed and reduced together, such as those of one layer or of several.

    module parameters      views of `_compute`, in the format of forwards; zero3 frees it between uses
    main parameters        views of `_main`, this copy's segment of it, in the format of updates
    gradients              see `unit_gradients`

Main parameters share the memory of `_compute` where formats are equal and nothing is freed. Under ddp without masters
they are the module's parameters themselves, and there is no other memory. Where they have memory of their own, that may
be a store (`main_memory`): a gather then is a read of this copy's segment, and the collective.

A module parameter stays one object, and `_compute` one storage that is resized: graphs that saved a parameter or a
view of it find its values again when it is gathered anew. What is not gathered reads as NaN, in the right shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeloom.ir import DataStrategy
from pipeloom.parallel.copies import Copies, Wait
from pipeloom.parallel.flat_layout import FlatLayout
from pipeloom.parallel.main_memory import AwayMemory, HeldMemory, MainMemory, home_of
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.options import Precision
from pipeloom.parallel.unit_gradients import UnitGradients, pieces, views
from pipeloom.runtime.held_bytes import Gauge
from pipeloom.runtime.ranges import Range

# The names of formats that need masters.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Formats:
    """Number formats of one unit.

    Attributes:
        compute: of forwards.
        main: of updates.
        gradient: in which micro-batches and copies add up.
    """

    compute: torch.dtype
    main: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, precision: Precision, *, stays: bool) -> Formats:
        """Of parameters that the model has in `dtype`, where it `stays` in all of them."""
        if stays or not precision.has_masters or not dtype.is_floating_point:
            return cls(dtype, dtype, dtype)
        compute, main = DTYPES[precision.dtype], torch.promote_types(dtype, torch.float32)
        return cls(compute, main, compute if precision.gradients == "same" else main)


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
        copies: Copies,
        gathered: Gauge,
        mover: Mover | None = None,
    ) -> None:
        self._gathered, self._mover = gathered, mover
        self.parameters = list(parameters.values())
        self._names = list(parameters)
        self._layout, self._formats, self._copies, self._strategy = layout, formats, copies, strategy
        self._frees = strategy is DataStrategy.ZERO3
        self._segment = _own_segment(strategy, copies)
        self.main: dict[str, nn.Parameter] = dict(parameters)
        self.ranges: dict[str, Range] = {}
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._compute: Tensor | None = None
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
        formats = self._formats
        if self._strategy is DataStrategy.DDP and formats.compute == formats.main:
            for view, parameter in zip(views, self.parameters, strict=True):
                parameter.copy_(view)
            return
        self._compute = flat.to(formats.compute)
        own = flat[self._layout.segment(self._segment or 0)] if self._segment is not None else flat[:0]
        apart = formats.compute != formats.main or self._frees
        if apart:
            own = own.to(formats.main, copy=True)
        self._module_views = self._views(self._compute)
        missing = self._compute.new_full((), math.nan if self._compute.is_floating_point() else 0)
        self._missing = [missing.expand(shape) for shape in self._shapes]
        self._set_module_parameters(self._module_views)
        self._make_main_parameters(own)
        self._main_dtype = own.dtype
        self._main: MainMemory = HeldMemory(own)
        if apart and self._mover is not None:  # on all copies alike, also where this one has no element
            self._main = AwayMemory(own, self.main.values(), self._mover, formats.compute, self._gathered)
            self._reads = True
        if self._frees:
            self._gathered.add(self._compute.nbytes)
            self.free()

    def _views(self, flat: Tensor) -> list[Tensor]:
        return views(flat, self._layout, self._shapes)

    def _make_main_parameters(self, own: Tensor) -> None:
        formats = self._formats
        own_pieces = pieces(own, self._layout, self._segment)
        for index, (name, piece) in enumerate(zip(self._names, own_pieces, strict=True)):
            module_parameter, shape = self.parameters[index], self._shapes[index]
            start, stop = self._layout.piece(index, self._segment)
            if self._keeps_whole and stop - start == shape.numel():
                piece = piece.view(shape)
            else:
                self.ranges[name] = Range(start, stop, tuple(shape))
            main = nn.Parameter(piece, requires_grad=module_parameter.requires_grad)
            vars(main).update(vars(module_parameter))  # what users note on parameters, such as "no weight decay"
            if module_parameter.is_floating_point():
                module_parameter.grad_dtype = formats.gradient
                if formats.gradient != formats.main:
                    main.grad_dtype = None  # any: updates widen them, see `pipeloom.runtime.optimizer_step`
            self.main[name] = main

    @property
    def _keeps_whole(self) -> bool:
        """Whether parameters are not cut into pieces."""
        return self._layout.num_segments == 1 or all(
            self._layout.piece(i, s) in ((0, 0), (0, size))
            for i, size in enumerate(self._layout.sizes)
            for s in range(self._layout.num_segments)
        )

    def _set_module_parameters(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value

    # Parameters

    def start_gather(self) -> None:
        """Begin to give module parameters the values of the main ones; does not wait."""
        if self.filled or self._gathering is not None:
            return
        if self._compute is None:
            self.filled = True
            return
        self.allocate()
        own = self._place
        arrive = self._awaited(self._main.fill(own)) if own is not None else _nothing
        if not self._collects:
            self._gathering = arrive
            return
        arrive()
        if self._strategy is DataStrategy.PARAMETER_SERVER:
            self._gathering = self._copies.broadcast(self._compute)
        else:
            assert own is not None
            self._gathering = self._copies.all_gather(self._compute, own)

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
        if self._compute is None or self._segment is None:
            return None
        return self._compute[self._layout.segment(self._segment)]

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
            assert self._compute is not None
            self._main.prefetch(self._place if self._compute.untyped_storage().nbytes() else None)

    def wait(self) -> None:
        """Module parameters have their values when it returns."""
        if self.filled:
            return
        self.start_gather()
        if self._gathering is not None:
            self._gathering()
            self._gathering = None
            self.show()
            self.filled = True

    def allocate(self) -> None:
        """Memory for module parameters, where zero3 freed it."""
        if self._compute is not None and self._frees and not self._compute.untyped_storage().nbytes():
            self._compute.untyped_storage().resize_(self._compute.nbytes)
            self._gathered.add(self._compute.nbytes)

    def show(self) -> None:
        """Have module parameters read what is in that memory."""
        if self._compute is not None and self._frees:
            self._set_module_parameters(self._module_views)

    def free(self) -> None:
        """Let go of what was gathered (zero3); waits for a gather on its way."""
        if self._compute is None or not self._frees:
            return
        gathering, self._gathering = self._gathering, None
        self._main.drop()
        try:
            if gathering is not None:
                gathering()
        finally:
            self._set_module_parameters(self._missing)
            if self._compute.untyped_storage().nbytes():
                self._compute.untyped_storage().resize_(0)
                self._gathered.add(-self._compute.nbytes)
            self.filled = False

    def stale(self) -> None:
        """Main parameters may have changed."""
        self.filled = False
        if self._compute is not None:
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
        if self._compute is None:
            return {}
        flat = self._compute.new_empty(self._layout.num_elements, dtype=self._main_dtype)
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
        if self._compute is None:
            return
        for index, (name, main) in enumerate(self.main.items()):
            start, stop = self._layout.piece(index, self._segment)
            value, home = values[name].reshape(-1)[start:stop].view(main.shape), home_of(main)
            main.copy_(value) if home is None else home.write(value)


def _own_segment(strategy: DataStrategy, copies: Copies) -> int | None:
    """Which segment this copy updates."""
    match strategy:
        case DataStrategy.DDP:
            return 0
        case DataStrategy.PARAMETER_SERVER:
            return 0 if copies.index == 0 else None
        case _:
            return copies.index


def _nothing() -> None:
    pass
