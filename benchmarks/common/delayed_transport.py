"""A pipeloom transport whose messages take an emulated latency; sends stay as asynchronous as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from benchmarks.common.links import EmulatedLinks
from pipeloom.transport.interface import Channel, Incoming, Lane, Message, Outgoing, Transport
from pipeloom.transport.values import Layout

_LANES = list(Lane)


class _Outgoing(Outgoing):
    def __init__(self, inner: Outgoing, links: EmulatedLinks, channel: Channel) -> None:
        self._inner, self._links = inner, links
        self._target, self._lane = channel.target, _LANES.index(channel.lane)

    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        self._links.note_send(self._target, self._lane)
        self._inner.send(layout, tensors, call)


class _Incoming(Incoming):
    def __init__(self, inner: Incoming, links: EmulatedLinks, channel: Channel) -> None:
        self._inner, self._links = inner, links
        self._source, self._lane = channel.source, _LANES.index(channel.lane)
        self._slot: tuple[int, int, int] | None = None  # of the message at the head of the channel

    def _head(self) -> tuple[int, int, int]:
        if self._slot is None:
            self._slot = self._links.next_arrival(self._source, self._lane)
        return self._slot

    def ready(self) -> bool:
        return self._inner.ready() and self._links.remaining_seconds(self._head()) <= 0

    def receive(self) -> Message:
        message = self._inner.receive()
        self._links.wait(self._head())
        self._slot = None
        return message


class DelayedTransport(Transport):
    """`inner`, a transport between processes, with the latency of `links`."""

    def __init__(self, inner: Transport, links: EmulatedLinks) -> None:
        self._inner, self._links = inner, links

    def open(self, channels: Iterable[Channel]) -> None:
        self._inner.open(channels)

    def outgoing(self, channel: Channel) -> Outgoing:
        return _Outgoing(self._inner.outgoing(channel), self._links, channel)

    def incoming(self, channel: Channel) -> Incoming:
        return _Incoming(self._inner.incoming(channel), self._links, channel)

    def end_step(self) -> None:
        self._inner.end_step()

    def close(self) -> None:
        self._inner.close()
