"""The forms of an `Axis`: over channels of a transport, and over a process group of torch.distributed."""

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.devices import Device
from pipeloom.devices.device import Stream
from pipeloom.parallel.axis import Axis, AxisMeter, Combine
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.waits import waits_for
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten

# A smaller all-reduce sends everything to everybody, in one exchange in place of two. Two members always do: in pieces
# they would send as much, wait twice and copy more.
_DIRECT_BYTES = 1 << 15


def _combined(parts: Sequence[Tensor], combine: Combine) -> Tensor:
    """The sum or maximum of two or more tensors, in their order."""
    first, second, *others = parts
    if combine == "sum":
        return reduce(Tensor.add_, others, first + second)
    return reduce(torch.maximum, others, torch.maximum(first, second))


class ChannelAxis(Axis):
    """An axis over channels between all pairs of its members.

    Args:
        transport: opened for the channels of `channels_between(members)`. Its receives block.
        members: their ranks in the transport, in the order of coordinates.
        copies: whether sent tensors are copied, which a transport that passes references needs: callers may change
            tensors in place after a collective. Tensors on a device are always copied: a transport reads them later.
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
        leaving = [t.clone() if self._copies or t.device.type != "cpu" else t for t in tensors]
        layout, flat = flatten(leaving, repeated=True)
        self._to[coordinate].send(layout, flat)

    def _receive(self, coordinate: int) -> list[Tensor]:
        return self._from[coordinate].receive().tensors

    def _all_gather(self, x: Tensor) -> list[Tensor]:
        for coordinate in self._others:
            self._send(coordinate, [x])
        return [x if c == self.index else self._receive(c)[0] for c in range(self.degree)]

    def _all_reduce(self, x: Tensor, combine: Combine) -> Tensor:
        if self.degree == 2 or x.nbytes < _DIRECT_BYTES or x.numel() < self.degree:
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

    def _all_to_all(self, pieces: list[Tensor], arriving: Sequence[Sequence[int]] | None) -> list[Tensor]:
        return self._exchange(pieces)

    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        if self.index != source:
            return lambda: self._receive(source)[0]
        for coordinate in self._others:
            self._send(coordinate, [x])
        return lambda: x

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
    """An axis over a process group of torch.distributed.

    Args:
        group: of the members.
        members: their ranks in the default group, in the order of coordinates.

    Attributes:
        members: as given.
    """

    def __init__(
        self, name: str, group: dist.ProcessGroup, members: Sequence[int], meter: AxisMeter | None = None
    ) -> None:
        super().__init__(name, len(members), members.index(dist.get_rank()), meter)
        self.members = tuple(members)
        self._first, self._second = group, group
        self._device: Device | None = None
        self._ranks = [dist.get_group_rank(group, member) for member in members]  # by coordinate
        self._coordinates = [self._ranks.index(rank) for rank in range(len(members))]  # by rank in the group

    def overlap(self, second: dist.ProcessGroup, device: Device) -> None:
        """From now on calls in the second stream of a device use the group `second` of the same members."""
        self._second, self._device = second, device

    @property
    def _group(self) -> dist.ProcessGroup:
        in_second = self._device is not None and self._device.is_in(Stream.SECOND)
        return self._second if in_second else self._first

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
        return [found[rank] for rank in self._ranks]

    def _reduce_scatter(self, pieces: Sequence[Tensor]) -> Tensor:
        found = torch.empty_like(pieces[self.index], memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.reduce_scatter(found, [pieces[c].contiguous() for c in self._coordinates], group=self._group)
        return found

    def _all_to_all(self, pieces: list[Tensor], arriving: Sequence[Sequence[int]] | None) -> list[Tensor]:
        own = pieces[self.index]
        if arriving is None:
            sent = self._all_gather(torch.tensor([list(piece.shape) for piece in pieces], device=own.device))
            arriving = [rows[self.index].tolist() for rows in sent]
        shapes = [torch.Size(arriving[c]) for c in self._coordinates]
        leaving = [pieces[c] for c in self._coordinates]
        get, put = [shape.numel() for shape in shapes], [piece.numel() for piece in leaving]
        received = own.new_empty(sum(get))
        with noticing_lost_peers():
            flat = torch.cat([piece.reshape(-1) for piece in leaving])
            dist.all_to_all_single(received, flat, get, put, group=self._group)
        parts = torch.split(received, get)
        return [parts[rank].view(shapes[rank]) for rank in self._ranks]

    def _broadcast(self, x: Tensor, source: int) -> Callable[[], Tensor]:
        found = x.clone(memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            work = dist.broadcast(found, group=self._group, group_src=self._ranks[source], async_op=True)

        def wait() -> Tensor:
            self._wait([work])
            return found

        return wait

    def _reduce(self, x: Tensor, target: int) -> Tensor | None:
        found = x.clone(memory_format=torch.contiguous_format)
        with noticing_lost_peers():
            dist.reduce(found, group=self._group, group_dst=self._ranks[target])
        return found if self.index == target else None

    @waits_for(lambda at: dist.get_process_group_ranks(at["self"]._group))
    def _wait(self, works: Sequence[dist.Work]) -> None:
        with noticing_lost_peers():
            for work in works:
                work.wait()

    def _shift(self, tensors: list[Tensor], by: int) -> Callable[[], list[Tensor]]:
        if by == 0:
            return lambda: tensors
        target, source = (self._ranks[(self.index + sign * by) % self.degree] for sign in (1, -1))
        sent = [tensor.contiguous() for tensor in tensors]
        found = [torch.empty_like(tensor) for tensor in sent]
        calls = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=target) for tensor in sent]
        calls += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=source) for tensor in found]
        with noticing_lost_peers():
            works = dist.batch_isend_irecv(calls)

        def finish() -> list[Tensor]:
            self._wait(works)
            sent.clear()
            return found

        return finish
