"""`Axis`: collectives along one axis of a mesh, called inside actions. Every call is counted and timed.

                 coordinate 0     coordinate 1
    all_reduce   a + b            a + b            the same bits everywhere: summed in the order of coordinates
    all_gather   [a, b]           [a, b]
    reduce_scatter  a0 + b0       a1 + b1          of values in pieces a0 a1 and b0 b1
    all_to_all   [a0, b0]         [a1, b1]
    shift(1)     b                a                around the ring

An axis has one coordinate per process or thread. All its members make the same calls in the same order. Two forms:

    ChannelAxis   over channels of a `Transport`: shared memory between processes of one host, queues between threads
    GroupAxis     over a process group of torch.distributed: NCCL, or gloo between hosts

Bytes per call and member, of n bytes along t members, are those of the ring algorithms (of broadcast and reduce: of the
payload): all_reduce 2 (t-1)/t n; all_gather and reduce_scatter (t-1)/t of the whole; all_to_all (t-1)/t n; shift,
broadcast and reduce n. With one member nothing is sent, and nothing counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from time import perf_counter
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten

Combine = Literal["sum", "max"]
_DIRECT_BYTES = 1 << 15  # a smaller all-reduce sends everything to everybody, in one exchange in place of two


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
        spans: the collectives of the last run, if `records`.
        records: whether spans are kept.
    """

    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    spans: list[AxisSpan] = field(default_factory=list)
    records: bool = False

    def add(self, axis: str, collective: str, start: float, num_bytes: int, *, calls: int = 1) -> None:
        """Count a call that began at `start` and ends now."""
        end = perf_counter()
        traffic = self.traffic.get((axis, collective))
        if traffic is None:
            traffic = self.traffic[axis, collective] = Traffic()
        traffic.calls += calls
        traffic.num_bytes += num_bytes
        traffic.seconds += end - start
        if self.records:
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

    def all_to_all(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Piece i of every member on member i, in the order of coordinates. Shapes may differ between pieces.

        Args:
            pieces: one per member.
        """
        if self.degree == 1:
            return list(pieces)
        start = perf_counter()
        found = self._all_to_all([piece.detach() for piece in pieces])
        sent = sum(piece.nbytes for coordinate, piece in enumerate(pieces) if coordinate != self.index)
        self.meter.add(self.name, "all_to_all", start, sent)
        return found

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of member `source`; the others pass a tensor of the same shape and dtype, whose values are not used."""
        if self.degree == 1:
            return x
        start = perf_counter()
        found = self._broadcast(x.detach(), source)
        self.meter.add(self.name, "broadcast", start, x.nbytes)
        return found

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

        def wait() -> list[Tensor]:
            begin = perf_counter()
            found = finish()
            self.meter.add(self.name, "shift", begin, 0, calls=0)
            return found

        return wait

    @abstractmethod
    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, x: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, pieces: list[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int) -> Tensor: ...

    @abstractmethod
    def _reduce(self, x: Tensor, target: int) -> Tensor | None: ...

    @abstractmethod
    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]: ...

    def __str__(self) -> str:
        return f"{self.name} {self.index} of {self.degree}"


def _combined(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    return reduce(add if combine == "sum" else torch.maximum, parts)


class ChannelAxis(Axis):
    """An axis over channels between all pairs of its members.

    Args:
        transport: opened for the channels of `channels_between(members)`. Its receives block.
        members: their ranks in the transport, in the order of coordinates.
        copies: whether sent tensors are copied, which a transport that passes references needs: callers may change
            tensors in place after a collective.
    """

    def __init__(
        self,
        name: str,
        transport: Transport | None,
        members: Sequence[int],
        index: int,
        *,
        copies: bool,
        meter: AxisMeter | None = None,
    ) -> None:
        super().__init__(name, len(members), index, meter)
        self._copies = copies
        self._others = [coordinate for coordinate in range(len(members)) if coordinate != index]
        own = members[index]
        if transport is not None:
            self._to = {c: transport.outgoing(Channel(own, members[c], Lane.AXIS)) for c in self._others}
            self._from = {c: transport.incoming(Channel(members[c], own, Lane.AXIS)) for c in self._others}

    @staticmethod
    def channels_between(members: Sequence[int]) -> list[Channel]:
        """The channels that a transport of these members must have open."""
        return [Channel(a, b, Lane.AXIS) for a in members for b in members if a != b]

    def _send(self, coordinate: int, tensors: Sequence[Tensor]) -> None:
        layout, flat = flatten([tensor.clone() for tensor in tensors] if self._copies else list(tensors))
        self._to[coordinate].send(layout, flat)

    def _receive(self, coordinate: int) -> list[Tensor]:
        return self._from[coordinate].receive().tensors

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        for coordinate in self._others:
            self._send(coordinate, [x])
        return [x if c == self.index else self._receive(c)[0] for c in range(self.degree)]

    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor:
        if x.nbytes < _DIRECT_BYTES or x.numel() < self.degree:
            return _combined(self._all_gather(x), combine)
        pieces = x.reshape(-1).tensor_split(self.degree)
        own = _combined(self._exchange(pieces), combine)
        return torch.cat(self._all_gather(own)).view(x.shape)

    def _exchange(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Piece i of every member on member i."""
        for coordinate in self._others:
            self._send(coordinate, [pieces[coordinate]])
        return [pieces[c] if c == self.index else self._receive(c)[0] for c in range(self.degree)]

    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        return _combined(self._exchange(pieces), "sum")

    def _all_to_all(self, pieces: list[Tensor]) -> list[Tensor]:
        return self._exchange(pieces)

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        if self.index != source:
            return self._receive(source)[0]
        for coordinate in self._others:
            self._send(coordinate, [x])
        return x

    def _reduce(self, x: Tensor, target: int) -> Tensor | None:
        if self.index != target:
            self._send(target, [x])
            return None
        return _combined([x if c == self.index else self._receive(c)[0] for c in range(self.degree)], "sum")

    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]:
        if by == 0:
            return lambda: tensors
        self._send((self.index + by) % self.degree, tensors)
        source = (self.index - by) % self.degree
        return lambda: self._receive(source)


class GroupAxis(Axis):
    """An axis over a process group of torch.distributed, whose ranks are the coordinates."""

    def __init__(self, name: str, group: dist.ProcessGroup, meter: AxisMeter | None = None) -> None:
        super().__init__(name, group.size(), group.rank(), meter)
        self._group = group

    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor:
        found = x.clone(memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.all_reduce(found, dist.ReduceOp.SUM if combine == "sum" else dist.ReduceOp.MAX, group=self._group)
        return found

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        found = [torch.empty_like(x) for _ in range(self.degree)]
        with noticing_lost_peers():
            dist.all_gather(found, x, group=self._group)
        return found

    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        found = torch.empty_like(pieces[self.index], memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.reduce_scatter(found, [piece.contiguous() for piece in pieces], group=self._group)
        return found

    def _all_to_all(self, pieces: list[Tensor]) -> list[Tensor]:
        own, ndim = pieces[self.index], pieces[self.index].dim()
        shapes = self._all_gather(torch.tensor([list(piece.shape) for piece in pieces], device=own.device))
        found = [own.new_empty(shapes[c][self.index].tolist() if ndim else ()) for c in range(self.degree)]
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        received = flat.new_empty(sum(piece.numel() for piece in found))
        sizes = [piece.numel() for piece in found], [piece.numel() for piece in pieces]
        with noticing_lost_peers():
            dist.all_to_all_single(received, flat, *sizes, group=self._group)
        parts = torch.split(received, sizes[0])
        return [part.view(piece.shape) for part, piece in zip(parts, found, strict=True)]

    def _broadcast(self, x: Tensor, source: int) -> Tensor:
        found = x.clone(memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.broadcast(found, group=self._group, group_src=source)
        return found

    def _reduce(self, x: Tensor, target: int) -> Tensor | None:
        found = x.clone(memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.reduce(found, group=self._group, group_dst=target)
        return found if self.index == target else None

    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]:
        if by == 0:
            return lambda: tensors
        target, source = (self.index + by) % self.degree, (self.index - by) % self.degree
        sent = [tensor.contiguous() for tensor in tensors]
        found = [torch.empty_like(tensor) for tensor in sent]
        calls = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=target) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=source) for tensor in found]
        with noticing_lost_peers():
            works = dist.batch_isend_irecv(calls)

        def finish() -> list[Tensor]:
            with noticing_lost_peers():
                for work in works:
                    work.wait()
            sent.clear()
            return found

        return finish
