"""`Transport`: how messages get from one rank to another. One small interface, wrapped rather than overridden.

A transport opens channels. A channel runs from one rank to another in one lane and is first in, first out. Lanes keep
what follows different orders apart: the pipeline's own messages, gradient sums, results, what an update depends on.

    loopback            all ranks in one process; tensors are handed over as they are
    shared_memory       ranks that are processes of one machine; one copy
    torch_distributed   anything torch.distributed reaches, gloo or NCCL
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from pipeloom.ir import Op, Program, peer_of
from pipeloom.transport.values import Layout


class Lane(StrEnum):
    """What a channel carries."""

    PIPELINE = "pipeline"
    GRADIENT = "gradient"
    RESULT = "result"
    UPDATE = "update"


class Channel(NamedTuple):
    """One direction between two ranks, in one lane."""

    source: int
    target: int
    lane: Lane


def program_channels(program: Program) -> set[Channel]:
    """The channels of all messages and gradient sums of a program, on all ranks."""
    channels = {
        Channel(rank, peer_of(action, program.placement), Lane.PIPELINE)
        for rank, action in program.actions()
        if action.op in (Op.SEND_F, Op.SEND_B)
    }
    streams = program.schedule.microbatches_per_update is not None  # their stages sum by themselves, update by update
    for ranks in program.placement.replicas if streams else map(program.ranks_of_group, program.gradient_groups):
        channels.update(Channel(a, b, Lane.GRADIENT) for a in ranks for b in ranks if a != b)
    return channels


class Message(NamedTuple):
    """What comes out of a channel.

    Attributes:
        layout, tensors: the value; `pipeloom.transport.values.unflatten` puts it together.
        call: the number that the sender gave, by which a receiver notices that ranks are out of step.
    """

    layout: Layout
    tensors: list[Tensor]
    call: int = 0


class Outgoing(ABC):
    """The sending end of a channel."""

    @abstractmethod
    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        """Send a message; returns without waiting for the receiver. Nobody may change the tensors afterwards."""


class Incoming(ABC):
    """The receiving end of a channel."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `receive` would return at once."""

    @abstractmethod
    def receive(self) -> Message:
        """The next message; waits for it. The tensors belong to the caller.

        Raises:
            PeerLost: the sender went away, or nothing came within the transport's timeout.
        """


class Transport(ABC):
    """One rank's access to the channels that start or end at it."""

    blocking: bool = True  # False: `receive` must not be called before `ready`, one process drives several ranks

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Open `channels`. Every rank calls this with the same channels in the same order."""

    @abstractmethod
    def outgoing(self, channel: Channel) -> Outgoing:
        """The sending end of an open channel that starts at this rank."""

    @abstractmethod
    def incoming(self, channel: Channel) -> Incoming:
        """The receiving end of an open channel that ends at this rank."""

    @abstractmethod
    def end_step(self) -> None:
        """Called after every step: what was sent is on its way without this process when it returns.

        Raises:
            PeerLost: a receiver went away before it had taken all.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all channels; messages already sent still arrive. Closing twice does nothing."""
