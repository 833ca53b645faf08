"""The gradients of one unit, from autograd to the optimizer.

module gradients       as autograd makes them: ``.grad`` of module parameters, until a reduction takes them
on their way           whole, one behind the other, in flat memory that a collective works on
sums over copies       this copy's segment, kept until the run's end
main gradients         ``.grad`` of main parameters: what earlier runs left, and the sums
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeloom.errors import RunError
from pipeloom.ir import DataStrategy
from pipeloom.parallel.data.flat_layout import FlatLayout
from pipeloom.parallel.data.replica_group import ReplicaGroup, Wait


def views(flat: Tensor, layout: FlatLayout, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Every whole parameter, in flat memory of all segments."""
    places = zip(layout.offsets, layout.sizes, shapes, strict=True)
    return [flat[offset : offset + size].view(shape) for offset, size, shape in places]


def pieces(own: Tensor, layout: FlatLayout, segment: int | None) -> list[Tensor]:
    """What of every parameter lies in one segment, in flat memory of that segment."""
    first = 0 if segment is None else segment * layout.segment_elements
    found = []
    for index, offset in enumerate(layout.offsets):
        start, stop = layout.piece(index, segment)
        found.append(own[offset + start - first : offset + stop - first] if stop > start else own[:0])
    return found


def _row(layout: FlatLayout) -> list[tuple[int, int]]:
    """The numbers of the parameters as they lie, each with the elements between the one before and it."""
    order = sorted(range(len(layout.sizes)), key=lambda index: (layout.offsets[index], layout.sizes[index]))
    ends = [0, *(layout.offsets[index] + layout.sizes[index] for index in order)]
    return [(layout.offsets[index] - end, index) for end, index in zip(ends, order, strict=False)]


class UnitGradients:
    """Sums of gradients over micro-batches and copies.

    Args:
        parameters: the module's.
        main: the main ones, by name, in the same order.
        layout: how they lie one behind the other.
        dtype: of their gradients.
        strategy: who keeps what.
        copies: over whom to sum.
        segment: which one this copy keeps.

    Attributes:
        present: for each parameter, whether this run made a gradient here.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        main: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        strategy: DataStrategy,
        copies: ReplicaGroup,
        segment: int | None,
    ) -> None:
        self._parameters, self._main = parameters, main
        self._layout, self._dtype = layout, dtype
        self._strategy, self._copies, self._segment = strategy, copies, segment
        self._row = _row(layout)
        self._own_sum: Tensor | None = None  # of this copy's segment
        self._sums: list[Tensor | None] = [None] * len(parameters)  # where there is one copy
        self._reducing: deque[tuple[Wait, Tensor, Tensor]] = deque()  # with what will be this copy's, and the whole
        self._aside: list[Tensor | None] = []
        self.present = [False] * len(parameters)
        self._trained = [parameter.requires_grad for parameter in parameters]

    def begin(self) -> None:
        """Set aside the gradients that earlier runs left."""
        pairs = zip(self._parameters, self._main.values(), strict=True)
        self._aside = [parameter.grad if parameter is main else None for parameter, main in pairs]
        for index, (parameter, main) in enumerate(zip(self._parameters, self._main.values(), strict=True)):
            parameter.grad = None
            if parameter.requires_grad is not main.requires_grad:  # frozen, or trained from now on, by either
                changed = main if main.requires_grad is not self._trained[index] else parameter
                parameter.requires_grad_(changed.requires_grad)
                main.requires_grad_(changed.requires_grad)
            self._trained[index] = main.requires_grad
        self.present = [False] * len(self._parameters)

    @property
    def late(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def start(self, look: Callable[[Tensor], None]) -> None:
        """Take the module's gradients and begin to sum them over copies; does not wait. Of one copy, once a run.

        Args:
            look: called when the most memory is taken, with what `tensors` does not have yet.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        for index, (name, gradient) in enumerate(zip(self._main, gradients, strict=True)):
            if gradient is not None:
                if gradient.is_sparse:
                    raise RunError(
                        f"parameter {name!r} has a sparse gradient: copies of a pipeline sum dense ones; build its "
                        "layer with sparse=False"
                    )
                self.present[index] = True
        flat = None
        if self._copies.degree == 1:
            self._sums = gradients
        else:
            flat = self._flattened(gradients)
            look(flat)
        for parameter in self._parameters:
            parameter.grad = None
        del gradient, gradients  # before there is memory for what comes of them
        if flat is not None:
            self._reducing.append((*self._reduce(flat), flat))

    @torch.no_grad()
    def _flattened(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """One behind the other, with zeros for those that are missing and in the gaps."""
        flat = self._parameters[0].new_empty(self._layout.num_elements, dtype=self._dtype)
        row: list[Tensor] = []
        for gap, index in self._row:
            gradient = gradients[index]
            row += [flat.new_zeros(gap)] if gap else []
            row.append(flat.new_zeros(self._layout.sizes[index]) if gradient is None else gradient.reshape(-1))
        row.append(flat.new_zeros(flat.numel() - sum(map(torch.numel, row))))
        return torch.cat(row, out=flat)

    def _reduce(self, flat: Tensor) -> tuple[Wait, Tensor]:
        """Begin the sum; what waits for it, and where this copy's segment of it will be."""
        match self._strategy:
            case DataStrategy.DDP:
                return self._copies.all_reduce(flat), flat
            case DataStrategy.PARAMETER_SERVER:
                return self._copies.reduce(flat), flat if self._segment is not None else flat[:0].clone()
            case _:
                own = flat.new_empty(self._layout.segment_elements)
                return self._copies.reduce_scatter(flat, own), own

    def finish_first(self) -> None:
        """Wait for the first reduction on its way."""
        wait, own, _ = self._reducing.popleft()
        wait()
        self._own_sum = own if self._own_sum is None else self._own_sum.add_(own)

    def deposit(self, present: Sequence[bool], loss_scale: float) -> None:
        """Add the run's sums to main gradients.

        Args:
            present: for each parameter, whether some copy has a gradient of it.
            loss_scale: by what to divide them.
        """
        sums = self._sums if self._own_sum is None else pieces(self._own_sum, self._layout, self._segment)
        for index, main in enumerate(self._main.values()):
            total = sums[index] if present[index] and main.numel() else None
            before = self._aside[index] if main is self._parameters[index] else main.grad
            if total is not None:
                total = total.view(main.shape) if loss_scale == 1.0 else total.view(main.shape).div_(loss_scale)
                total = total if before is None else before.add_(total)
            main.grad = before if total is None else total
        self.drop()

    def drop(self) -> None:
        """Forget what a run left."""
        self._own_sum, self._aside = None, []
        self._sums = [None] * len(self._parameters)
        self._reducing.clear()

    def tensors(self) -> Iterator[Tensor]:
        """Everything that holds gradients now."""
        for parameter in (*self._parameters, *self._main.values()):
            if parameter.grad is not None:
                yield parameter.grad
        yield from (tensor for tensor in (self._own_sum, *self._sums, *self._aside) if tensor is not None)
        for _, own, flat in self._reducing:
            yield from (own, flat)
