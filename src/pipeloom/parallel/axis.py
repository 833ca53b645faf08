"""`Axis`: collectives along one axis of a mesh, called inside actions. Every call is counted and timed.

                 coordinate 0     coordinate 1
    all_reduce   a + b            a + b            the same bits everywhere: summed in the order of coordinates
    all_gather   [a, b]           [a, b]
    reduce_scatter  a0 + b0       a1 + b1          of values in pieces a0 a1 and b0 b1
    all_to_all   [a0, b0]         [a1, b1]
    shift(1)     b                a                around the ring

An axis has one coordinate per process or thread. All its members make the same calls in the same order. Two forms:

    ChannelAxis   over channels of a `Transport`: shared memory between processes of one host, queues between threads
    GroupAxis     over a process group of torch.distributed: NCCL, or gloo between hosts (both in `axis_forms`)

Bytes per call and member, of n bytes along t members, are those of the ring algorithms (of broadcast and reduce: of the
payload): all_reduce 2 (t-1)/t n; all_gather and reduce_scatter (t-1)/t of the whole; all_to_all (t-1)/t n; shift,
broadcast and reduce n. With one member nothing is sent, and nothing counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

_MOST_SPANS = 100_000

T = TypeVar("T")
Combine = Literal["sum", "max"]


@dataclass(slots=True)
class Traffic:
    """What one kind of collective has sent along an axis.

    Attributes:
        calls: number of calls.
        num_bytes: sent by this member; see the module for what a call counts.
        seconds: spent in the calls, waiting for other members included.
    """

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class AxisSpan(NamedTuple):
    """One collective of the last run, in perf_counter seconds."""

    axis: str
    collective: str
    start: float
    end: float
    num_bytes: int


@dataclass(slots=True)
class AxisMeter:
    """Counts the collectives of one member along one or several axes.

    Attributes:
        traffic: by axis and collective, since the meter was made.
        spans: the last collectives since `begin`, at most 100,000; empty before it.
    """

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    spans: deque[AxisSpan] = field(default_factory=lambda: deque(maxlen=0))

    _counts: bool = True

    def begin(self) -> None:
        """A run of a pipeline begins: forget the spans of the one before, and keep those of this one."""
        self.spans = deque(maxlen=_MOST_SPANS)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collectives inside the block, those of set-up, are not counted."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def add(self, axis: str, collective: str, start: float, num_bytes: int, *, calls: int = 1) -> None:
        """Count a call that began at `start` and ends now."""
        if not self._counts:
            return
        end = perf_counter()
        traffic = self.traffic.get((axis, collective))
        if traffic is None:
            traffic = self.traffic[axis, collective] = Traffic()
        traffic.calls += calls
        traffic.num_bytes += num_bytes
        traffic.seconds += end - start
        if self.spans.maxlen:
            self.spans.append(AxisSpan(axis, collective, start, end, num_bytes))


class Axis(ABC):
    """One member's access to an axis.

    Args:
        name: such as "tp"; of several mesh axes together, their names joined by "+".
        degree: number of members.
        index: coordinate of this member.
        meter: counts its calls; None: a meter of its own.

    Results are new tensors; arguments are not changed. No method is differentiable: see
    `pipeloom.parallel.axis_functions`.
    """

    def __init__(self, name: str, degree: int, index: int, meter: AxisMeter | None = None) -> None:
        self.name, self.degree, self.index = name, degree, index
        self.meter = AxisMeter() if meter is None else meter

    def all_reduce(self, x: Tensor, combine: Combine = "sum") -> Tensor:
        """The sum or maximum over all members, equal in every bit on all of them."""
        if self.degree == 1:
            return x
        start = perf_counter()
        found = self._all_reduce(x.detach(), combine)
        self.meter.add(self.name, "all_reduce", start, 2 * x.nbytes * (self.degree - 1) // self.degree)
        return found

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        """All members' `x`, concatenated along `dim` in the order of coordinates. All have the same shape."""
        if self.degree == 1:
            return x
        start = perf_counter()
        found = torch.cat(self._all_gather(x.detach()), dim)
        self.meter.add(self.name, "all_gather", start, x.nbytes * (self.degree - 1))
        return found

    def reduce_scatter(self, x: Tensor, dim: int = 0) -> Tensor:
        """This member's piece along `dim` of the sum over all members. The size of `dim` is a multiple of `degree`."""
        if self.degree == 1:
            return x
        start = perf_counter()
        found = self._reduce_scatter(x.detach().chunk(self.degree, dim))
        self.meter.add(self.name, "reduce_scatter", start, x.nbytes * (self.degree - 1) // self.degree)
        return found

    def all_to_all(self, pieces: Sequence[Tensor], arriving: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Piece i of every member on member i, in the order of coordinates. Shapes may differ between pieces.

        Args:
            pieces: one per member.
            arriving: shapes of what arrives from each member, which saves a message on process groups; None: unknown.
        """
        if self.degree == 1:
            return list(pieces)
        start = perf_counter()
        found = self._all_to_all([piece.detach() for piece in pieces], arriving)
        sent = sum(piece.nbytes for coordinate, piece in enumerate(pieces) if coordinate != self.index)
        self.meter.add(self.name, "all_to_all", start, sent)
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of member `source`; the others pass a tensor of the same shape and dtype, whose values are not used."""
        return self.start_broadcast(x, source)()

    def start_broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        """Begin a broadcast, so that it overlaps with what is computed next.

        Returns:
            A function that waits for the tensor of `source`, and returns it. It is called once, in the order of the
            broadcasts, before a collective of another kind is called on this axis.
        """
        if self.degree == 1:
            return lambda: x
        start = perf_counter()
        finish = self._broadcast(x.detach(), source)
        self.meter.add(self.name, "broadcast", start, x.nbytes)
        return self._waiting(finish, "broadcast")

    def _waiting(self, finish: Callable[[], T], collective: str) -> Callable[[], T]:
        """`finish`, whose time is counted too."""

        def wait() -> T:
            start = perf_counter()
            found = finish()
            self.meter.add(self.name, collective, start, 0, calls=0)
            return found

        return wait

    def reduce(self, x: Tensor, target: int) -> Tensor | None:
        """The sum over all members, on member `target`; None elsewhere."""
        if self.degree == 1:
            return x
        start = perf_counter()
        found = self._reduce(x.detach(), target)
        self.meter.add(self.name, "reduce", start, x.nbytes)
        return found

    def shift(self, tensors: Sequence[Tensor], by: int = 1) -> Callable[[], list[Tensor]]:
        """Begin to send `tensors` to the member `by` places further around the ring.

        Returns:
            A function that waits for the tensors of the member `by` places back, and returns them. It is called once,
            before the next shift is begun or after, in the order of the shifts.
        """
        if self.degree == 1:
            return lambda: list(tensors)
        start, num_bytes = perf_counter(), sum(tensor.nbytes for tensor in tensors)
        finish = self._shift([tensor.detach() for tensor in tensors], by % self.degree)
        self.meter.add(self.name, "shift", start, num_bytes)
        return self._waiting(finish, "shift")

    @abstractmethod
    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, pieces: list[Tensor], arriving: Sequence[Sequence[int]] | None) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]: ...

    @abstractmethod
    def _reduce(self, x: Tensor, target: int) -> Tensor | None: ...

    @abstractmethod
    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]: ...

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # copies of a module communicate along the same axis

    def __str__(self) -> str:
        return f"{self.name} {self.index} of {self.degree}"
