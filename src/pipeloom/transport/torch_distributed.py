"""Messages over torch.distributed: gloo between CPU ranks of several hosts, NCCL between CUDA ranks.

Every channel has its own process group, so that messages of two channels never wait for each other and a failure does
not spread; closing the channel destroys the group. A receiver must know sizes in advance, so a message starts with an
envelope of fixed size, which always travels over a CPU group. The envelope holds the layout, and the tensors too if
they are small and on the CPU. Other tensors follow it.

    envelope   | kind | length of layout | call | layout | tensors, each aligned to 64 bytes |
    layout     a separate message, where it is too long for the envelope
    payloads   one message per tensor, where the envelope says so

The receiver has one thread per channel, which takes messages off the wire as they arrive. This replaces receives that
are posted early, which would need to know the sizes. The schedule bounds how far a sender can run ahead. Sends are
asynchronous; their tensors are released as soon as they are done.
"""

import atexit
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.devices import Mark, device_of
from pipeloom.devices.communicators import COMMUNICATORS, without_splits
from pipeloom.devices.device import Stream
from pipeloom.errors import PeerLost
from pipeloom.processes.collectives import destroy_groups, first_line, is_lost_peer, noticing_lost_peers
from pipeloom.processes.waits import waits_for
from pipeloom.transport.call_numbers import in_words, of_words
from pipeloom.transport.interface import Channel, Incoming, Message, Outgoing, Transport
from pipeloom.transport.values import Layout, decode

_ENVELOPE_BYTES = 1 << 14
_HEAD = struct.Struct("<IIQH")  # kind, length of the layout, call
_MOST_HEADER_BYTES = _ENVELOPE_BYTES - _HEAD.size  # a longer layout is a message of its own
_NO_TIMEOUT = timedelta(days=365)  # of groups: a listening thread waits as long as its peer sends nothing
_CLOSING_SECONDS = 5.0
_PAD = 64
_END, _WHOLE, _FOLLOWED = 0, 1, 2  # kinds: closes the channel; holds all; payloads follow


class _PeerGroup:
    """One of the two process groups of a channel, seen from one of its two ranks; `peer` is the other's group rank."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self._groups = [group]  # this reference keeps the group usable after destroy_process_group()
        self._peer = peer

    def send(self, tensor: Tensor) -> dist.Work:
        return self._groups[0].send([tensor], self._peer, 0)

    def receive(self, tensor: Tensor) -> None:
        self._groups[0].recv([tensor], self._peer, 0).wait()

    def first_exchange(self, *, sends: bool) -> Callable[[Tensor], object]:
        """What sends a tensor to the peer, or receives it from there."""
        return (lambda tensor: self.send(tensor).wait()) if sends else self.receive

    def close(self, *, orderly: bool) -> None:
        """Destroy the group. Its threads and sockets end when the last reference is gone."""
        if not orderly:  # NCCL would wait for a peer that may have ended
            for group in self._groups:
                group.abort()
        destroy_groups(self._groups)
        self._groups.clear()


class _TorchOutgoing(Outgoing):
    def __init__(
        self, channel: Channel, target: int, control: _PeerGroup, data: _PeerGroup, timeout_seconds: float
    ) -> None:
        self._channel, self._control, self._data = channel, control, data
        self.target_process = target
        self._timeout = timedelta(seconds=timeout_seconds)
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        while self._in_flight and self._in_flight[0][0].is_completed():  # release the tensors of sends that are done
            self._in_flight.popleft()
        start = _payload_start(layout)
        whole = start + layout.num_bytes <= _ENVELOPE_BYTES and all(t.device.type == "cpu" for t in tensors)
        envelope = _envelope(_WHOLE if whole else _FOLLOWED, layout.header, call)
        if whole:
            for place, tensor in zip(_places(envelope, layout), tensors, strict=True):
                place.copy_(tensor)
        payloads = [] if whole else [_wire_form(tensor.detach()) for tensor in tensors if tensor.numel()]
        self._post(envelope, self._control)
        if len(layout.header) > _MOST_HEADER_BYTES:
            self._post(torch.frombuffer(bytearray(layout.header), dtype=torch.uint8), self._control)
        for payload in payloads:
            self._post(payload, self._data)

    def _post(self, tensor: Tensor, link: _PeerGroup) -> None:
        with noticing_lost_peers(f"rank {self._channel.target} cannot be reached"):
            self._in_flight.append((link.send(tensor), tensor))

    @waits_for(lambda at: [at["self"].target_process])
    def end_step(self) -> None:
        """Wait until all sends are done."""
        with noticing_lost_peers(f"rank {self._channel.target} did not take what this rank sent"):
            while self._in_flight:
                self._in_flight[0][0].wait(self._timeout)
                self._in_flight.popleft()

    def finish(self) -> bool:
        """Tell the receiver's thread to end. Returns whether the message was sent."""
        try:
            self._post(_envelope(_END, b"", 0), self._control)
            while self._in_flight:
                self._in_flight.popleft()[0].wait(timedelta(seconds=_CLOSING_SECONDS))
        except RuntimeError:  # the peer has ended
            self._in_flight.clear()
            return False
        return True


@dataclass(eq=False)
class _TorchIncoming(Incoming):
    _channel: Channel
    source_process: int
    _control: _PeerGroup
    _data: _PeerGroup
    _device: torch.device
    _timeout_seconds: float
    _idle: Callable[[], bool]

    def __post_init__(self) -> None:
        self._messages: SimpleQueue[tuple[Message, Mark] | Exception] = SimpleQueue()
        self.thread = threading.Thread(target=self._listen, name=f"receive-{self._channel.source}", daemon=True)
        self.thread.start()

    def ready(self) -> bool:
        return not self._messages.empty()

    @waits_for(lambda at: [at["self"].source_process])
    def receive(self) -> Message:
        while not self._idle() and self._messages.empty():  # another rank may wait for what is still to be sent here
            time.sleep(0.001)
        try:
            found = self._messages.get(timeout=self._timeout_seconds)
        except Empty:
            raise self._channel.timed_out(self._timeout_seconds, self.source_process) from None
        if isinstance(found, Exception):
            self._messages.put(found)  # the next call raises it too
            if not isinstance(found, ConnectionError) and not is_lost_peer(found):
                raise found
            words = first_line(found)
            happened = "ended" if "timed out" not in words else "could not be reached"  # the kernel's words
            sender = self._channel.sender(self.source_process)
            raise PeerLost(f"{sender} {happened} while rank {self._channel.target} waited for it ({words})") from found
        message, arrived = found
        if arrived is None:
            return message
        device = device_of(self._device)
        return message._replace(tensors=[device.receive(tensor, arrived) for tensor in message.tensors])

    def _listen(self) -> None:
        device = device_of(self._device)
        try:
            while True:
                envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8)
                self._control.receive(envelope)
                view = envelope.numpy().data
                kind, length, *call = _HEAD.unpack_from(view)
                if kind == _END:
                    self._messages.put(ConnectionError("it closed the channel"))
                    return
                if length <= _MOST_HEADER_BYTES:
                    layout = decode(bytes(view[_HEAD.size : _HEAD.size + length]))
                else:
                    header = torch.empty(length, dtype=torch.uint8)
                    self._control.receive(header)
                    layout = decode(header.numpy().tobytes())
                if kind == _WHOLE:
                    tensors = _places(envelope, layout)
                    arrived = None
                else:
                    with device.on(Stream.INCOMING):  # its stream waits for NCCL; computations go on
                        tensors = [
                            torch.empty(shape, dtype=dtype, device=device.device) for shape, dtype, _ in layout.specs
                        ]
                        for tensor in filter(torch.numel, tensors):
                            self._data.receive(_wire_form(tensor))
                        arrived = device.mark()
                self._messages.put((Message(layout, tensors, of_words(*call)), arrived))
        except Exception as error:  # raised by the rank's own thread
            self._messages.put(error)


class TorchDistributedTransport(Transport):
    """Channels over gloo, between CUDA devices over NCCL.

    Args:
        rank: pipeline rank of this process.
        device: of received tensors.
        replicas: for every data-parallel replica of the pipeline, its processes (ranks in the default group), by
            pipeline rank; this process is in one of them. None: one replica, the whole default group.
        timeout_seconds: how long a receive may wait.
        idle: called while a receive waits, until it returns True: this process has nothing left to send elsewhere.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: torch.device,
        replicas: Sequence[Sequence[int]] | None = None,
        timeout_seconds: float = 1800.0,
        idle: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rank, self._process = rank, dist.get_rank()
        self._replicas = replicas or (range(dist.get_world_size()),)
        self._device, self._timeout_seconds, self._idle = device, timeout_seconds, idle
        self._outgoing: dict[Channel, _TorchOutgoing] = {}
        self._incoming: dict[Channel, _TorchIncoming] = {}
        self._links: list[_PeerGroup] = []

    def open(self, channels: Iterable[Channel]) -> None:
        atexit.register(self.close)  # a thread that still listens when the interpreter ends would abort the process
        # Every process makes every group, of all replicas, because torch.distributed names groups by a counter. Only
        # the two members of a group connect.
        for channel in channels:
            for replica in self._replicas:
                members = sorted((replica[channel.source], replica[channel.target]))
                with without_splits():
                    control = dist.new_group(members, timeout=_NO_TIMEOUT, backend="gloo")
                    data = control
                    if self._device.type != "cpu":
                        backend = "nccl" if self._device.type == "cuda" else None
                        data = dist.new_group(members, timeout=_NO_TIMEOUT, backend=backend)
                if self._process not in members:
                    continue
                peer = 1 - members.index(self._process)
                process = members[peer]
                links = _PeerGroup(control, peer), _PeerGroup(data, peer)
                self._links += links
                sends = channel.source == self._rank
                if self._device.type == "cuda":
                    with noticing_lost_peers(f"rank {channel.target if sends else channel.source} cannot be reached"):
                        COMMUNICATORS.connect(data, device_of(self._device), links[1].first_exchange(sends=sends))
                if sends:
                    self._outgoing[channel] = _TorchOutgoing(channel, process, *links, self._timeout_seconds)
                else:
                    self._incoming[channel] = _TorchIncoming(
                        channel, process, *links, self._device, self._timeout_seconds, self._idle
                    )

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._outgoing[channel]

    def incoming(self, channel: Channel) -> Incoming:
        return self._incoming[channel]

    def end_step(self) -> None:
        for end in self._outgoing.values():
            end.end_step()

    def close(self) -> None:
        atexit.unregister(self.close)
        told = [outgoing.finish() for outgoing in self._outgoing.values()]
        deadline = time.monotonic() + _CLOSING_SECONDS
        for incoming in self._incoming.values():
            incoming.thread.join(timeout=max(0.0, deadline - time.monotonic()))
        orderly = all(told) and not any(incoming.thread.is_alive() for incoming in self._incoming.values())
        for link in self._links:
            link.close(orderly=orderly)
        self._links.clear()
        self._outgoing.clear()
        self._incoming.clear()


def _envelope(kind: int, header: bytes, call: int) -> Tensor:
    envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8)
    head = _HEAD.pack(kind, len(header), *in_words(call)) + (header if len(header) <= _MOST_HEADER_BYTES else b"")
    envelope.numpy().data[: len(head)] = head
    return envelope


def _payload_start(layout: Layout) -> int:
    return -(-(_HEAD.size + len(layout.header)) // _PAD) * _PAD


def _places(envelope: Tensor, layout: Layout) -> list[Tensor]:
    """Views of the tensors in an envelope."""
    first = _payload_start(layout)
    return [
        envelope[first + offset : first + offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for (shape, dtype, _), offset in zip(layout.specs, layout.offsets, strict=True)
    ]


def _wire_form(tensor: Tensor) -> Tensor:
    """The tensor contiguous, and as bytes on the CPU, since gloo does not know all dtypes; a view where possible."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.device.type == "cpu" else tensor
