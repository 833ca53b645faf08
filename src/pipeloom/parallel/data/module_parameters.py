"""`ModuleMemory`: where the module parameters of one unit live, which forwards and backwards read."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from pipeloom.engine.stores.parameter_bytes import Gauge
from pipeloom.parallel.data.flat_layout import FlatLayout
from pipeloom.parallel.data.unit_gradients import views


class ModuleMemory:
    """Flat memory of whole parameters, which zero3 frees between uses.

    A module parameter stays one object, and `flat` one storage that is resized: graphs that saved a parameter or a view
    of it find its values again when it is gathered anew. What is not gathered reads as NaN, in the right shape.

    Args:
        parameters: the module's.
        layout: how they lie one behind the other.
        flat: their values; from now on the parameters are views of it.
        frees: whether `free` does anything.
        gathered: counts the bytes that are there and can be freed.

    Attributes:
        flat, frees: as given.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], layout: FlatLayout, flat: Tensor, *, frees: bool, gathered: Gauge
    ) -> None:
        self.flat, self.frees = flat, frees
        self._parameters, self._gathered = parameters, gathered
        shapes = [parameter.shape for parameter in parameters]
        self._views = views(flat, layout, shapes)
        missing = flat.new_full((), math.nan if flat.is_floating_point() else 0)
        self._missing = [missing.expand(shape) for shape in shapes]
        self._set(self._views)
        if frees:
            gathered.add(flat.nbytes)

    @property
    def is_there(self) -> bool:
        """Whether there is memory for values."""
        return bool(self.flat.untyped_storage().nbytes())

    def allocate(self) -> None:
        """Memory for values, where it was freed."""
        if self.frees and not self.is_there:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self._gathered.add(self.flat.nbytes)

    def show(self) -> None:
        """Have module parameters read what is in that memory."""
        if self.frees:
            self._set(self._views)

    def free(self) -> None:
        """Let go of it."""
        if self.frees:
            self._set(self._missing)
            if self.is_there:
                self.flat.untyped_storage().resize_(0)
                self._gathered.add(-self.flat.nbytes)

    def _set(self, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
