"""`Links`: collectives that overlap computations, between data-parallel replicas.

    ProcessLinks    a process group of torch.distributed
    SharedLinks     the same, and shared memory between processes of one host
    ThreadLinks     queues between threads

A method starts a collective and returns the works to wait for, in this order.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.shared_channel import SharedIncoming, SharedOutgoing
from pipeloom.transport.shared_flat import SharedFlat, memory_file
from pipeloom.transport.shared_memory import SharedMemoryTransport
from pipeloom.transport.values import Layout, flatten

# Their names before torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
LOST = "another replica exited or did not answer in time during a collective"
# Up to this size, exchanges pass through shared memory, which then holds what is in flight in addition to the tensors.
_SMALL_BYTES = 1 << 16
Parts = tuple[Layout, Sequence[Tensor]]  # the tensors of a message


class Links(ABC):
    """This replica's access to the others.

    Attributes:
        degree, index: number of replicas, and the number of this one.
        backend: "gloo", "nccl" or "threads".
    """

    degree: int
    index: int
    backend: str

    @abstractmethod
    def broadcast(self, values: Tensor) -> list[Any]:
        """The values of replica 0, in place."""

    @abstractmethod
    def reduce(self, values: Tensor) -> list[Any]:
        """The sum over replicas, in place on replica 0; the values of the others are lost."""

    @abstractmethod
    def all_reduce(self, values: Tensor) -> list[Any]:
        """The sum over replicas, in place: the same bits on every replica."""

    @abstractmethod
    def exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> list[Any]:
        """Send to and receive from other replicas."""

    def sum_pieces(self, pieces: Sequence[Tensor], own: Tensor) -> list[Any]:
        """Into `own` the sum over replicas of the piece for this replica. The first other replica's is added first."""
        first, *others = [peer for peer in range(self.degree) if peer != self.index]
        arriving = {first: own, **{peer: torch.empty_like(own) for peer in others}}
        works = self.exchange({peer: pieces[peer] for peer in (first, *others)}, arriving)
        return [*works, _Sum(own, [pieces[self.index], *(arriving[peer] for peer in others)])]

    def flat(self, num_elements: int, dtype: torch.dtype) -> SharedFlat | None:
        """Memory that all replicas read in place; None: they have none in common. Every replica calls it."""
        return None

    def end_run(self) -> None:  # noqa: B027
        """Called when a run is over on this replica."""

    @abstractmethod
    def on_end(self, works: Sequence[Any], ended: Callable[[], None]) -> None:
        """Have `ended` called when a collective has ended, where the backend can; else its wait calls it."""


class ProcessLinks(Links):
    """Replicas that are processes.

    Args:
        group: returns their process group, whose ranks are the replicas. It raises once the group is closed.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup]) -> None:
        self._group = group
        made = group()
        self.degree, self.index, self.backend = made.size(), made.rank(), dist.get_backend(made)

    def broadcast(self, values: Tensor) -> list[Any]:
        return [dist.broadcast(values, group=self._group(), group_src=0, async_op=True)]

    def reduce(self, values: Tensor) -> list[Any]:
        return [dist.reduce(values, group=self._group(), group_dst=0, async_op=True)]

    def all_reduce(self, values: Tensor) -> list[Any]:
        return [dist.all_reduce(values, group=self._group(), async_op=True)]

    def all_gather(self, values: Tensor, own: Tensor) -> list[Any]:
        """Every replica's `own`, in order, into `values`, on a GPU."""
        return [_ALL_GATHER(values, own, group=self._group(), async_op=True)]

    def reduce_scatter(self, values: Tensor, own: Tensor) -> list[Any]:
        """Into `own` this replica's segment of the sum of `values`, on a GPU."""
        return [_REDUCE_SCATTER(own, values, group=self._group(), async_op=True)]

    def exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> list[Any]:
        """gloo's own all-gather and reduce-scatter use a ring, copies and threads: they take 1.5 times (13 MB, two
        replicas) to 4 times (4 KB) as long.
        """
        group = self._group()
        works: list[Any] = [dist.irecv(t, group=group, group_src=peer) for peer, t in arriving.items() if t.numel()]
        return works + [dist.isend(t, group=group, group_dst=peer) for peer, t in leaving.items() if t.numel()]

    def on_end(self, works: Sequence[Any], ended: Callable[[], None]) -> None:
        # An exchange has no callback for its end. On a GPU it would be called at once.
        if len(works) == 1 and self.backend == "gloo" and hasattr(works[0], "get_future"):
            works[0].get_future().add_done_callback(lambda _: ended())


class _Sum:
    """Adds what has arrived."""

    def __init__(self, own: Tensor, parts: list[Tensor]) -> None:
        self._own, self._parts = own, parts

    def wait(self, timeout: object = None) -> None:
        for part in self._parts:
            self._own.add_(part)
        self._parts.clear()


class _Receives:
    """Works of channels: what has arrived is taken from them in the order of the collectives."""

    def __init__(self, waiting: deque[Callable[[], None]], take: Callable[[], None]) -> None:
        self._waiting, self._is_done = waiting, False

        def receive() -> None:
            take()
            self._is_done = True

        waiting.append(receive)

    def wait(self, timeout: object = None) -> None:
        while not self._is_done:
            if not self._waiting:
                raise PeerLost(LOST)
            take = self._waiting.popleft()
            try:
                take()
            except BaseException:
                self._waiting.clear()  # what else arrives belongs to other collectives
                raise


class SharedChannels:
    """The channels of one lane between this process and other processes of its host; all their links share them.

    Args:
        transport: connects the processes, by their ranks in the default group.
        line: these ranks, in the order of replicas.
        index: number of this replica.
        lane: of the channels.
    """

    def __init__(self, transport: SharedMemoryTransport, line: Sequence[int], index: int, lane: Lane) -> None:
        self.transport, own = transport, line[index]
        transport.open([Channel(a, b, lane) for a in line for b in line if a != b])
        others = [(peer, rank) for peer, rank in enumerate(line) if peer != index]
        self._to = {peer: transport.outgoing(Channel(own, rank, lane)) for peer, rank in others}
        self.incoming = {peer: transport.incoming(Channel(rank, own, lane)) for peer, rank in others}
        self.waiting: deque[Callable[[], None]] = deque()

    def send(self, leaving: Mapping[int, Parts]) -> None:
        """Send tensors, which may be changed afterwards."""
        is_empty = self.transport.flush()  # else the transport would copy the tensors later
        for peer, (layout, tensors) in leaving.items():
            self._to[peer].send(layout, tensors if is_empty else [tensor.clone() for tensor in tensors])

    def lent(self, peer: int) -> AbstractContextManager[list[Tensor]]:
        """See `SharedIncoming.lent`."""
        end = self.incoming[peer]
        assert isinstance(end, SharedIncoming)
        return end.lent()

    @property
    def num_bytes(self) -> int:
        """Of memory that holds messages of this process, and is kept for later ones."""
        return sum(end.num_bytes for end in self._to.values() if isinstance(end, SharedOutgoing))

    def broadcast_file(self, num_bytes: int, *, is_source: bool) -> int:
        """The descriptor of a memory file that one replica makes for all."""
        while self.waiting:
            self.waiting.popleft()()
        if not is_source:
            source = self.incoming[0]
            assert isinstance(source, SharedIncoming)
            return source.receive_file()
        self.transport.end_step()
        descriptor = memory_file(num_bytes, "parameters that replicas share")
        for end in self._to.values():
            assert isinstance(end, SharedOutgoing)
            end.send_file(descriptor)
        return descriptor


class _SharedReceives(_Receives):
    """Works of shared channels, whose waits end after a timeout."""

    def __init__(self, channels: SharedChannels, take: Callable[[], None]) -> None:
        super().__init__(channels.waiting, take)
        self._transport = channels.transport

    def wait(self, timeout: object = None) -> None:
        assert isinstance(timeout, timedelta)
        self._transport.timeout_seconds = timeout.total_seconds()
        try:
            super().wait()
        except PeerLost as error:
            raise PeerLost(f"{LOST} ({error})") from error


class SharedLinks(ProcessLinks):
    """Replicas that are processes of one host, with tensors on the CPU.

    Sums of segments and small exchanges pass through shared memory: a message per process in place of gloo's threads
    and sockets. Other collectives are those of the process group.
    """

    def __init__(self, group: Callable[[], dist.ProcessGroup], channels: SharedChannels) -> None:
        super().__init__(group)
        self._channels = channels

    def exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> list[Any]:
        if max(tensor.nbytes for tensor in (*leaving.values(), *arriving.values())) > _SMALL_BYTES:
            return super().exchange(leaving, arriving)
        self._channels.send({peer: flatten(tensor.detach()) for peer, tensor in leaving.items() if tensor.numel()})

        def take() -> None:
            for peer, tensor in arriving.items():
                if tensor.numel():
                    with self._channels.lent(peer) as found:
                        tensor.copy_(found[0])

        return [_SharedReceives(self._channels, take)]

    def sum_pieces(self, pieces: Sequence[Tensor], own: Tensor) -> list[Any]:
        leaving = {peer: flatten(pieces[peer].detach()) for peer in self._channels.incoming}
        return self.sum_parts(leaving, [pieces[self.index]], lambda sums: own.copy_(sums[0]))

    def sum_parts(
        self, leaving: Mapping[int, Parts], own: list[Tensor], take_sums: Callable[[list[Tensor]], object]
    ) -> list[Any]:
        """Call `take_sums` with the sums over replicas of `own`, in memory that is lent until it returns.

        Args:
            leaving: by replica, what it adds to its own. The first other replica's is added first.
            own: of this replica, for this replica.
            take_sums: called in a wait.
        """
        first, *others = self._channels.incoming
        self._channels.send(leaving)

        def take() -> None:
            with self._channels.lent(first) as sums:
                if own:
                    torch._foreach_add_(sums, own)
                for peer in others:
                    with self._channels.lent(peer) as parts:
                        if own:
                            torch._foreach_add_(sums, parts)
                take_sums(sums)

        return [_SharedReceives(self._channels, take)]

    def flat(self, num_elements: int, dtype: torch.dtype) -> SharedFlat | None:
        descriptor = self._channels.broadcast_file(num_elements * dtype.itemsize, is_source=self.index == 0)
        return SharedFlat(descriptor, num_elements, dtype)

    def end_run(self) -> None:
        self._channels.transport.end_step()


class ThreadLinks(Links):
    """Replicas that are threads.

    Args:
        transport: connects them; its ranks are the replicas.
        lane: of its messages; each kind of replicas has its own.
    """

    backend = "threads"

    def __init__(self, transport: Transport, degree: int, index: int, lane: Lane = Lane.REPLICA) -> None:
        self.degree, self.index = degree, index
        others = [peer for peer in range(degree) if peer != index]
        transport.open([Channel(a, b, lane) for a in range(degree) for b in range(degree) if a != b])
        self._to = {peer: transport.outgoing(Channel(index, peer, lane)) for peer in others}
        self._from = {peer: transport.incoming(Channel(peer, index, lane)) for peer in others}
        self._waiting: deque[Callable[[], None]] = deque()

    def broadcast(self, values: Tensor) -> list[Any]:
        if self.index == 0:
            return self.exchange(dict.fromkeys(self._to, values), {})
        return self.exchange({}, {0: values})

    def reduce(self, values: Tensor) -> list[Any]:
        if self.index:
            return self.exchange({0: values}, {})
        return self._sum({}, values)

    def all_reduce(self, values: Tensor) -> list[Any]:
        return self._sum(dict.fromkeys(self._to, values), values)

    def _sum(self, leaving: Mapping[int, Tensor], values: Tensor) -> list[Any]:
        """Add up the values of all replicas in their order, in place."""
        self._send(leaving)
        own = values.clone()

        def take() -> None:
            first, *others = [
                own if r == self.index else self._from[r].receive().tensors[0] for r in range(self.degree)
            ]
            values.copy_(sum(others, first))

        return [_Receives(self._waiting, take)]

    def exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor]) -> list[Any]:
        self._send(leaving)

        def take() -> None:
            for peer, tensor in arriving.items():
                if tensor.numel():
                    tensor.copy_(self._from[peer].receive().tensors[0])

        return [_Receives(self._waiting, take)]

    def on_end(self, works: Sequence[Any], ended: Callable[[], None]) -> None:
        """What arrives is taken in a wait."""

    def _send(self, leaving: Mapping[int, Tensor]) -> None:
        for peer, tensor in leaving.items():
            if tensor.numel():
                self._to[peer].send(*flatten(tensor.detach().clone()))
