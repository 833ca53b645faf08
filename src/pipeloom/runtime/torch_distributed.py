"""Messages over torch.distributed: gloo between CPU ranks of several machines, NCCL between CUDA ranks.

Every channel has a process group of its own, so that messages of two channels never wait for each other and a failure
stays where it is. A message starts with an envelope of fixed size, always by a CPU group, since a receiver has to know
sizes beforehand. It holds the layout, and the tensors too if they are small and on the CPU; else they follow.

    envelope   | kind | length of layout | layout | tensors, each aligned to 64 bytes |
    payloads   one message a tensor, where the envelope says so

On the receiving side one thread a channel takes messages off the wire as they come, which is what posting receives
early means where sizes are not known beforehand; how far a sender can run ahead is bounded by the schedule. Sends are
asynchronous; what they hold is dropped as soon as they are done.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import InputError, PeerLost
from pipeloom.runtime.transport import Channel, Incoming, Outgoing, Transport
from pipeloom.runtime.values import Layout, decode

_ENVELOPE_BYTES = 1 << 14
_HEAD = struct.Struct("<II")  # kind, length of the layout
_PAD = 64
_END, _WHOLE, _FOLLOWED = 0, 1, 2  # kinds: closes the channel; holds all; payloads follow


class _Outgoing(Outgoing):
    def __init__(self, channel: Channel, control: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        self._channel = channel
        self._control = control
        self._data = data
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(self, layout: Layout, tensors: Sequence[Tensor]) -> None:
        self.release()
        start = _payload_start(layout)
        whole = start + layout.num_bytes <= _ENVELOPE_BYTES and all(t.device.type == "cpu" for t in tensors)
        envelope = _envelope(_WHOLE if whole else _FOLLOWED, layout.header)
        if whole:
            for place, tensor in zip(_places(envelope, layout), tensors, strict=True):
                place.copy_(tensor)
        self._post(envelope, self._control)
        for tensor in () if whole else tensors:
            if tensor.numel():
                self._post(_wire_form(tensor.detach()), self._data)

    def _post(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        try:
            work = dist.isend(tensor, self._channel.target, group=group)
        except RuntimeError as error:
            raise PeerLost(f"rank {self._channel.target} cannot be reached ({_first_line(error)})") from error
        if work is not None:
            self._in_flight.append((work, tensor))

    def release(self) -> None:
        """Forget sends that are done."""
        while self._in_flight and self._in_flight[0][0].is_completed():
            self._in_flight.popleft()

    def finish(self) -> None:
        """Close the channel: the other side's thread ends when this arrives."""
        try:
            self._post(_envelope(_END, b""), self._control)
            while self._in_flight:
                self._in_flight.popleft()[0].wait()
        except (RuntimeError, PeerLost):
            self._in_flight.clear()  # the peer is gone: nobody is left to tell


class _Incoming(Incoming):
    def __init__(
        self,
        channel: Channel,
        control: dist.ProcessGroup,
        data: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._channel = channel
        self._control = control
        self._data = data
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._messages: SimpleQueue[tuple[Layout, list[Tensor]] | Exception] = SimpleQueue()
        self.thread = threading.Thread(target=self._listen, name=f"receive-{channel.source}", daemon=True)
        self.thread.start()

    def ready(self) -> bool:
        return not self._messages.empty()

    def receive(self) -> tuple[Layout, list[Tensor]]:
        try:
            message = self._messages.get(timeout=self._timeout_seconds)
        except Empty:
            raise PeerLost(
                f"rank {self._channel.target} waited {self._timeout_seconds:g} s for rank {self._channel.source}"
            ) from None
        if isinstance(message, Exception):
            self._messages.put(message)  # whoever asks again gets the same answer
            raise PeerLost(
                f"rank {self._channel.source} ended while rank {self._channel.target} waited for it "
                f"({_first_line(message)})"
            ) from message
        return message

    def _listen(self) -> None:
        try:
            while True:
                envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8)
                dist.recv(envelope, self._channel.source, group=self._control)
                view = envelope.numpy().data
                kind, length = _HEAD.unpack_from(view)
                if kind == _END:
                    self._messages.put(ConnectionError("it closed the channel"))
                    return
                if length > _ENVELOPE_BYTES - _HEAD.size:
                    raise ConnectionError(f"it sent a layout of {length} bytes")
                layout = decode(bytes(view[_HEAD.size : _HEAD.size + length]))
                if kind == _WHOLE:
                    tensors = _places(envelope, layout)
                else:
                    tensors = [self._receive_tensor(shape, dtype) for shape, dtype, _ in layout.specs]
                self._messages.put((layout, tensors))
        except Exception as error:  # handed to the rank's own thread, which raises it with its context
            self._messages.put(error)

    def _receive_tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        if tensor.numel():
            dist.recv(_wire_form(tensor), self._channel.source, group=self._data)
        return tensor


class TorchDistributedTransport(Transport):
    """Channels over the default process group's backend.

    Args:
        rank: this process's rank in the default group.
        device: where received tensors are to lie.
        timeout_seconds: how long a receive may wait.
    """

    def __init__(self, rank: int, *, device: torch.device, timeout_seconds: float = 1800.0) -> None:
        self._rank = rank
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._outgoing: dict[Channel, _Outgoing] = {}
        self._incoming: dict[Channel, _Incoming] = {}

    def open(self, channels: Iterable[Channel]) -> None:
        timeout = timedelta(seconds=self._timeout_seconds)
        for channel in channels:  # every rank makes every group: torch.distributed wants that
            members = sorted((channel.source, channel.target))
            control = dist.new_group(members, timeout=timeout, backend="gloo")
            data = control if self._device.type == "cpu" else dist.new_group(members, timeout=timeout)
            if channel.source == self._rank:
                self._outgoing[channel] = _Outgoing(channel, control, data)
            elif channel.target == self._rank:
                self._incoming[channel] = _Incoming(channel, control, data, self._device, self._timeout_seconds)

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._outgoing[channel]

    def incoming(self, channel: Channel) -> Incoming:
        return self._incoming[channel]

    def end_step(self) -> None:
        for end in self._outgoing.values():
            end.release()

    def close(self) -> None:
        for outgoing in self._outgoing.values():
            outgoing.finish()
        for incoming in self._incoming.values():
            incoming.thread.join(timeout=5.0)
        self._outgoing.clear()
        self._incoming.clear()


def _envelope(kind: int, header: bytes) -> Tensor:
    if _HEAD.size + len(header) > _ENVELOPE_BYTES:
        raise InputError(
            f"a value between stages has a layout of {len(header)} bytes: over torch.distributed it has room for "
            f"{_ENVELOPE_BYTES - _HEAD.size}; pass fewer tensors, or stack them"
        )
    envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8)
    envelope.numpy().data[: _HEAD.size + len(header)] = _HEAD.pack(kind, len(header)) + header
    return envelope


def _payload_start(layout: Layout) -> int:
    return -(-(_HEAD.size + len(layout.header)) // _PAD) * _PAD


def _places(envelope: Tensor, layout: Layout) -> list[Tensor]:
    """The part of an envelope that holds tensors, as tensors."""
    first = _payload_start(layout)
    return [
        envelope[first + offset : first + offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)
        for (shape, dtype, _), offset in zip(layout.specs, layout.offsets, strict=True)
    ]


def _wire_form(tensor: Tensor) -> Tensor:
    """Contiguous, and as bytes where a backend has no such dtype; on a fresh contiguous tensor a view of it."""
    tensor = tensor.contiguous()
    return tensor.view(-1).view(torch.uint8) if tensor.device.type == "cpu" else tensor


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
