"""`FullParameters`: the memory of a unit's full (unsharded) parameters, which zero3 frees between uses."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from pipeloom.engine.stores.held_bytes import Gauge
from pipeloom.parallel.data.unit_layout import FlatLayout
from pipeloom.transport.shared_flat import SharedFlat


class FullParameters:
    """Flat memory of full parameters, which zero3 frees between uses.

    A module parameter stays one object, and `flat` stays one storage, which is resized: a graph that saved a parameter
    or a view of it reads its values again after the next gather. A freed parameter reads as NaN.

    Memory that replicas of one host share is not resized. It counts as gathered while this process may read it, and its
    parameters read as NaN only between runs.

    Attributes:
        flat: the values of the module's parameters, which are views of it from now on.
        frees: whether `free` frees anything; `gathered` counts the bytes that are there and can be freed.
        shared: the memory of `flat` that replicas read in place; None: it has memory of its own.
        is_there: whether there is memory for values.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: FlatLayout,
        flat: Tensor,
        frees: bool,
        gathered: Gauge,
        shared: SharedFlat | None = None,
    ) -> None:
        self.flat, self.frees, self.shared, self.is_there = flat, frees, shared, True
        self._parameters, self._gathered = parameters, gathered
        shapes = [parameter.shape for parameter in parameters]
        self._views = layout.views(flat, shapes)
        missing = flat.new_full((), math.nan if flat.is_floating_point() else 0)
        self._missing = [missing.expand(shape) for shape in shapes]
        self._shown: Sequence[Tensor] = ()
        self._set(self._views)
        if frees:
            gathered.add(flat.nbytes)

    def allocate(self) -> None:
        """Allocate memory for values, if it was freed."""
        if self.frees and not self.is_there:
            if self.shared is None:
                self.flat.untyped_storage().resize_(self.flat.nbytes)
            self._gathered.add(self.flat.nbytes)
            self.is_there = True

    def show(self) -> None:
        """Have module parameters read that memory."""
        if self.frees:
            self._set(self._views)

    def free(self) -> None:
        """Free the memory."""
        if self.shared is None:
            self._set(self._missing)
        if self.is_there:
            if self.shared is None:
                self.flat.untyped_storage().resize_(0)
            self._gathered.add(-self.flat.nbytes)
            self.is_there = False

    def forget(self) -> None:
        """Between runs: drop what this process wrote into shared memory, and have parameters read as NaN."""
        if self.shared is not None:
            self._set(self._missing)
            self.shared.forget()

    def _set(self, values: Sequence[Tensor]) -> None:
        if values is self._shown:
            return
        self._shown = values
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.data = value
