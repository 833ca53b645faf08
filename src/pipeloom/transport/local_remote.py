"""Shared memory to peers on this machine, torch.distributed to all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeloom.transport.interface import Channel, Incoming, Outgoing, Transport


class LocalRemoteTransport(Transport):
    """Route each channel to one of two transports.

    Args:
        near: carries the channels that `is_near` says yes to.
        far: carries the others.
        is_near: the same answer on every rank, for every channel.
    """

    def __init__(self, near: Transport, far: Transport, is_near: Callable[[Channel], bool]) -> None:
        self._near = near
        self._far = far
        self._is_near = is_near

    def _of(self, channel: Channel) -> Transport:
        return self._near if self._is_near(channel) else self._far

    def open(self, channels: Iterable[Channel]) -> None:
        channels = list(channels)
        self._far.open([channel for channel in channels if not self._is_near(channel)])
        self._near.open([channel for channel in channels if self._is_near(channel)])

    def outgoing(self, channel: Channel) -> Outgoing:
        return self._of(channel).outgoing(channel)

    def incoming(self, channel: Channel) -> Incoming:
        return self._of(channel).incoming(channel)

    def end_step(self) -> None:
        self._near.end_step()
        self._far.end_step()

    def close(self) -> None:
        self._near.close()
        self._far.close()
