"""`LoopbackTransport`: messages between ranks that share one process."""

from collections.abc import Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from pipeloom.devices import Device, HostDevice, Mark
from pipeloom.errors import PeerLost
from pipeloom.transport.interface import Channel, Incoming, Message, OneProcessTransport, Outgoing
from pipeloom.transport.values import Layout

_HOST = HostDevice()


class _Queue(Outgoing, Incoming):
    """Both ends of a channel within one process. None in place of a message: the sender has stopped."""

    def __init__(self, channel: Channel, timeout_seconds: float, source: Device, target: Device) -> None:
        self._channel, self._timeout_seconds = channel, timeout_seconds
        self._source, self._target = source, target
        self._moves = source.is_asynchronous or target.is_asynchronous
        self.messages: SimpleQueue[tuple[Message, Mark] | None] = SimpleQueue()

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        self.messages.put((Message(layout, list(tensors), call), self._source.mark()))

    def ready(self) -> bool:
        return not self.messages.empty()

    def receive(self) -> Message:
        try:
            found = self.messages.get(timeout=self._timeout_seconds)
        except Empty:
            raise self._channel.timed_out(self._timeout_seconds) from None
        if found is None:
            raise PeerLost(f"rank {self._channel.source} stopped")
        message, sent = found
        if not self._moves:
            return message
        # What is elsewhere than its sender, such as lengths on the CPU, stays there.
        home = self._source.device
        here = [self._target.receive(t, sent) if t.device == home else t for t in message.tensors]
        return message._replace(tensors=here)


class LoopbackTransport(OneProcessTransport):
    """All ranks in one process: messages are references in a queue; no tensor is copied within a device.

    Either one thread runs all ranks in turn (deterministic; `blocking` is False), or each rank has its own thread,
    which sleeps in `receive`.

    Args:
        blocking: True where every rank has its own thread.
        timeout_seconds: how long a rank may wait for a message.
    """

    def __init__(self, *, blocking: bool = False, timeout_seconds: float = 1800.0) -> None:
        self.blocking = blocking
        self._timeout_seconds = timeout_seconds
        self._queues: dict[Channel, _Queue] = {}
        self._devices: Mapping[int, Device] = {}

    def place(self, devices: Mapping[int, Device]) -> None:
        self._devices = devices

    def open(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            if channel not in self._queues:
                source, target = (self._devices.get(rank, _HOST) for rank in (channel.source, channel.target))
                self._queues[channel] = _Queue(channel, self._timeout_seconds, source, target)

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._queues[channel]

    def incoming(self, channel: Channel) -> Incoming:
        return self._queues[channel]

    def end_step(self) -> None:
        """Queues hold nothing once their messages are taken."""

    def interrupt(self, source: int) -> None:
        for channel, queue in self._queues.items():
            if channel.source == source:
                queue.messages.put(None)

    def close(self) -> None:
        self._queues.clear()
