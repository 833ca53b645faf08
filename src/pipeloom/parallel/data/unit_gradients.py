"""`UnitGradients`: the gradients of one unit, from autograd to the optimizer.

module gradients      ``.grad`` of module parameters, as autograd makes them, until a reduction takes them
flat gradients        full: the flat tensor that a collective sums over replicas. Replicas that share memory do without:
                      each copies its gradients into messages
sums over replicas    this replica's segment, kept until the run ends
main gradients        ``.grad`` of main parameters: the sums, added to the gradients of earlier runs
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import Wait
from pipeloom.errors import RunError
from pipeloom.ir import DataStrategy
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit_layout import FlatLayout, own_segment
from pipeloom.transport.values import Layout, flatten


class _Part(NamedTuple):
    """The elements of one parameter that lie in a segment; `is_full`: all of them."""

    parameter: int
    start: int
    stop: int
    is_full: bool


@dataclass(eq=False)
class _Sum:
    """The sum over the micro-batches of a run: this replica's segment, and its parts."""

    flat: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class UnitGradients:
    """The gradients, of format `dtype`, of one unit, summed over micro-batches and replicas (see `Unit`).

    The main parameters have the order of the module's `parameters`.

    Attributes:
        present: for each parameter, whether this replica has a gradient in this run.
        arrivals: of the backwards that end in a reduction, in this run: whether all gradients came in them.
    """

    parameters: Sequence[nn.Parameter]
    _main: Mapping[str, nn.Parameter]
    _layout: FlatLayout
    _dtype: torch.dtype
    _strategy: DataStrategy
    _replicas: ReplicaGroup

    def __post_init__(self) -> None:
        offsets, sizes = self._layout.offsets, self._layout.sizes
        self._order = sorted(range(len(sizes)), key=lambda index: (offsets[index], sizes[index]))
        self._sum = _Sum()
        self._sums: list[Tensor | None] = [None] * len(self.parameters)  # instead, where there is one replica
        self._reducing: deque[tuple[Wait, Sequence[Tensor]]] = deque()  # with the gradients that it reads or makes
        device = self.parameters[0].device
        shards = self._strategy.shards_optimizer and not self._strategy.has_server
        self._sends_parts = shards and self._replicas.shares_memory and device.type == "cpu"
        self._parts: list[list[_Part]] = []  # by segment
        self._layouts: list[Layout] = []  # likewise, of messages with its parts
        self._zero = torch.zeros((), dtype=self._dtype, device=device)
        for segment in range(self._layout.num_segments) if self._sends_parts else ():
            spans = [(index, *self._layout.shard(index, segment)) for index in range(len(sizes))]
            parts = [_Part(*span, span[2] - span[1] == sizes[span[0]]) for span in spans if span[2] > span[1]]
            shapes = [self.parameters[i].shape if full else (stop - start,) for i, start, stop, full in parts]
            self._parts.append(parts)
            self._layouts.append(flatten([self._zero.expand(shape) for shape in shapes])[0])
        self._aside: list[Tensor | None] = []
        self.present = [False] * len(self.parameters)
        self.arrivals: set[bool] = set()
        self._trained = [parameter.requires_grad for parameter in self.parameters]

    def begin(self) -> None:
        """Set aside the gradients of earlier runs."""
        pairs = list(zip(self.parameters, self._main.values(), strict=True))
        self._aside = [parameter.grad if parameter is main else None for parameter, main in pairs]
        for index, (parameter, main) in enumerate(pairs):
            parameter.grad = None
            if parameter.requires_grad is not main.requires_grad:  # the user froze or unfroze one of the two
                changed = main if main.requires_grad is not self._trained[index] else parameter
                parameter.requires_grad_(changed.requires_grad)
                main.requires_grad_(changed.requires_grad)
            self._trained[index] = main.requires_grad
        self.present = [False] * len(self.parameters)
        self.arrivals.clear()

    @property
    def is_alone(self) -> bool:
        """Whether no other replica has these parameters: gradients add up in place until the run ends."""
        return self._replicas.degree == 1

    @property
    def late(self) -> bool:
        """Whether there are gradients that no reduction has taken."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def start(self, look: Callable[[Tensor | None], None]) -> None:
        """Take the module's gradients and start their reduction, without waiting. One replica: once per run.

        `look` is called at peak memory, with flat gradients that `tensors` does not yield yet.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                if gradient.is_sparse:
                    raise RunError(
                        f"parameter {[*self._main][index]!r} has a sparse gradient, which data parallelism does not "
                        "support. Build its layer with sparse=False."
                    )
                self.present[index] = True
        flat = None
        if self.is_alone:
            self._sums = gradients
        elif self._sends_parts:
            look(None)
            self._send_parts(gradients)
        else:
            flat = self._flattened(gradients)
            look(flat)
        for parameter in self.parameters:
            parameter.grad = None
        del gradient, gradients  # before the sum is allocated
        if flat is not None:
            wait, own = self._replicas.reduce_full(self._strategy, flat)
            self._reducing.append((partial(self._wait_and_add, self._sum, wait, own), (own, flat)))

    def _send_parts(self, gradients: Sequence[Tensor | None]) -> None:
        """Start the reduction of gradients in messages between replicas that share memory."""
        own, leaving = self._replicas.index, {}
        for replica, layout in enumerate(self._layouts):
            if replica != own:
                leaving[replica] = layout, self._part(gradients, replica)
        parts = zip(self._part(gradients, own), self._parts[own], strict=True)
        kept = [gradient if part.is_full else gradient.clone() for gradient, part in parts]  # else all of it would stay
        self._reducing.append((self._replicas.sum_parts(leaving, kept, partial(self._add, self._sum)), kept))

    def _part(self, gradients: Sequence[Tensor | None], segment: int) -> list[Tensor]:
        """The gradients of a segment, with zeros for missing ones."""
        found = []
        for part, (shape, dtype, _) in zip(self._parts[segment], self._layouts[segment].specs, strict=True):
            gradient = gradients[part.parameter]
            if gradient is None:
                gradient = self._zero.expand(shape)
            elif not part.is_full:
                gradient = gradient.reshape(-1)[part.start : part.stop]
            found.append(gradient if gradient.dtype is dtype else gradient.to(dtype))
        return found

    @torch.no_grad()
    def _flattened(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """The gradients in flat memory, with zeros for missing ones and in the gaps."""
        flat = self.parameters[0].new_empty(self._layout.num_elements, dtype=self._dtype)
        row, end = [], 0
        for index in self._order:
            gradient, gap = gradients[index], self._layout.offsets[index] - end
            row += [flat.new_zeros(gap)] if gap else []
            row.append(flat.new_zeros(self._layout.sizes[index]) if gradient is None else gradient.reshape(-1))
            end = self._layout.offsets[index] + self._layout.sizes[index]
        return torch.cat([*row, flat.new_zeros(flat.numel() - end)], out=flat)

    def wait_first(self) -> None:
        """Wait for the oldest reduction."""
        wait, _ = self._reducing.popleft()
        wait()

    @staticmethod
    def _wait_and_add(total: _Sum, wait: Wait, own: Tensor) -> None:
        wait()
        total.flat = own if total.flat is None else total.flat.add_(own)

    @torch.no_grad()
    def _add(self, total: _Sum, parts: list[Tensor]) -> None:
        """Add this replica's parts, summed over replicas."""
        if total.flat is None:
            total.flat = self._zero.new_empty(self._layout.segment_elements)
            shards = self._layout.shards(total.flat, self._replicas.index)
            places = [shards[part.parameter] for part in self._parts[self._replicas.index]]
            total.parts = [place.view(part.shape) for place, part in zip(places, parts, strict=True)]
            if parts:
                torch._foreach_copy_(total.parts, parts)
        elif parts:
            torch._foreach_add_(total.parts, parts)

    def deposit(self, present: Sequence[bool], loss_scale: float) -> None:
        """Add the run's sums, divided by `loss_scale`, to the main gradients of the parameters that are `present`."""
        segment = own_segment(self._strategy, self._replicas.index)
        sums = self._sums if self._sum.flat is None else self._layout.shards(self._sum.flat, segment)
        for index, main in enumerate(self._main.values()):
            total = sums[index] if present[index] and main.numel() else None
            before = self._aside[index] if main is self.parameters[index] else main.grad
            if present[index] and total is None and main.numel():  # found on processes with other experts alone
                total = torch.zeros(main.shape, dtype=self._dtype, device=main.device)
            if total is not None:
                total = total.view(main.shape) if loss_scale == 1.0 else total.view(main.shape).div_(loss_scale)
                total = total if before is None else before.add_(total)
            main.grad = before if total is None else total
        self._aside = []
        self.drop()

    def drop(self) -> None:
        """Drop all state of the run; gradients of earlier runs that are still set aside come back."""
        for parameter, before in zip(self.parameters, self._aside, strict=False):
            if before is not None:
                parameter.grad = before
        self._sum, self._aside = _Sum(), []
        self._sums = [None] * len(self.parameters)
        self._reducing.clear()

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that hold gradients now."""
        grads = (parameter.grad for parameter in (*self.parameters, *self._main.values()))
        yield from (tensor for tensor in (*grads, self._sum.flat, *self._sums, *self._aside) if tensor is not None)
        for _, gradients in self._reducing:
            yield from gradients
