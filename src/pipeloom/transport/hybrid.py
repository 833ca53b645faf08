"""`HybridTransport`: one transport for some channels, another for the rest."""

from collections.abc import Callable, Iterable

from pipeloom.transport.interface import Channel, Incoming, Outgoing, Transport


class HybridTransport(Transport):
    """Routes each channel to one of two transports, such as shared memory within a host and torch.distributed between.

    Args:
        local: carries the channels for which `is_local` returns True.
        remote: carries the others.
        is_local: whether both ranks of a channel are on one host; must return the same on every rank.
    """

    def __init__(self, local: Transport, remote: Transport, is_local: Callable[[Channel], bool]) -> None:
        self._local, self._remote, self._is_local = local, remote, is_local

    def _route(self, channel: Channel) -> Transport:
        return self._local if self._is_local(channel) else self._remote

    def open(self, channels: Iterable[Channel]) -> None:
        channels = list(channels)
        for transport in (self._remote, self._local):
            transport.open([channel for channel in channels if self._route(channel) is transport])

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._route(channel).outgoing(channel)

    def incoming(self, channel: Channel) -> Incoming:
        return self._route(channel).incoming(channel)

    def end_step(self) -> None:
        self._local.end_step()
        self._remote.end_step()

    def close(self) -> None:
        self._local.close()
        self._remote.close()
