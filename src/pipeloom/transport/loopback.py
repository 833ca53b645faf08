"""`LoopbackTransport`: messages between ranks that share one process."""

from collections.abc import Iterable, Sequence
from queue import Empty, SimpleQueue

from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.transport.interface import Channel, Incoming, Message, OneProcessTransport, Outgoing
from pipeloom.transport.values import Layout


class _Queue(Outgoing, Incoming):
    """Both ends of a channel within one process. None in place of a message: the sender has stopped."""

    def __init__(self, channel: Channel, timeout_seconds: float) -> None:
        self._channel, self._timeout_seconds = channel, timeout_seconds
        self.messages: SimpleQueue[Message | None] = SimpleQueue()

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        self.messages.put(Message(layout, list(tensors), call))

    def ready(self) -> bool:
        return not self.messages.empty()

    def receive(self) -> Message:
        try:
            message = self.messages.get(timeout=self._timeout_seconds)
        except Empty:
            raise self._channel.timed_out(self._timeout_seconds) from None
        if message is None:
            raise PeerLost(f"rank {self._channel.source} stopped")
        return message


class LoopbackTransport(OneProcessTransport):
    """All ranks in one process: messages are references in a queue, no tensor is copied.

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

    def open(self, channels: Iterable[Channel]) -> None:
        for channel in channels:
            self._queues.setdefault(channel, _Queue(channel, self._timeout_seconds))

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
