"""`Transport`: sends messages from one rank to another.

Extend a transport by wrapping it, not by subclassing it.

A transport opens channels. A channel runs from one rank to another in one lane and is first in, first out. A lane holds
messages that are received in the order in which they are sent; messages with different orders have different lanes.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from torch import Tensor

from pipeloom.devices import Device
from pipeloom.errors import PeerLost
from pipeloom.ir import Action, Program, peer_of
from pipeloom.ir.action import SENDS, SKIP_OPS
from pipeloom.transport.values import Layout


class Lane(StrEnum):
    """The kind of messages in a channel."""

    PIPELINE = "pipeline"  # activations and their gradients
    SKIP = "skip"  # values that skip stages, and their gradients
    GRADIENT = "gradient"  # gradients of parameters that several ranks hold
    RESULT = "result"  # losses and outputs
    UPDATE = "update"  # norms and losses that decide about an optimizer step
    REPLICA = "replica"  # parameters and gradients between data-parallel replicas that are threads
    EXPERT_REPLICA = "expert-replica"  # the same between expert-data replicas
    AXIS = "axis"  # collectives inside an action, between the processes that share a stage


class Channel(NamedTuple):
    """One direction between two ranks, in one lane."""

    source: int
    target: int
    lane: Lane

    def sender(self, process: int | None = None) -> str:
        """Names the sender in errors; `process`: its rank in the default group, which replicas make another number."""
        return f"rank {self.source}" + ("" if process in (None, self.source) else f" (global rank {process})")

    def timed_out(self, seconds: float, process: int | None = None) -> PeerLost:
        """The error of a receive that waited this long; `process` as in `sender`."""
        return PeerLost(f"rank {self.target} waited {seconds:g} s for {self.sender(process)}")


def lane_of(action: Action) -> Lane:
    """The lane of a SEND or RECV."""
    return Lane.SKIP if action.op in SKIP_OPS else Lane.PIPELINE


def program_channels(program: Program) -> set[Channel]:
    """The channels of all messages and gradient sums of a program, on all ranks."""
    channels = {
        Channel(rank, peer_of(action, program.placement), lane_of(action))
        for rank, action in program.actions()
        if action.op in SENDS
    }
    streams = program.schedule.microbatches_per_update is not None  # in a stream each stage sums its own gradients
    for ranks in program.placement.replicas if streams else map(program.ranks_of_group, program.gradient_groups):
        channels.update(Channel(a, b, Lane.GRADIENT) for a in ranks for b in ranks if a != b)
    return channels


class Message(NamedTuple):
    """A received message.

    Attributes:
        layout, tensors: the value, as `pipeloom.transport.values.unflatten` takes it.
        call: the number that the sender passed; see `call_number`.
    """

    layout: Layout
    tensors: list[Tensor]
    call: int = 0


class Outgoing(ABC):
    """The sending end of a channel."""

    @abstractmethod
    def send(self, layout: Layout, tensors: Sequence[Tensor], call: int = 0) -> None:
        """Send a message; returns without waiting for the receiver. The tensors must not be changed afterwards.

        On a device, they are complete once the current stream has done what it holds now.
        """


class Incoming(ABC):
    """The receiving end of a channel."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `receive` would return at once."""

    @abstractmethod
    def receive(self) -> Message:
        """The next message; waits for it. The tensors belong to the caller, whose current stream may use them.

        Raises:
            PeerLost: the sender ended, or nothing came within the transport's timeout.
        """


class Transport(ABC):
    """One rank's access to the channels that start or end at it.

    Attributes:
        blocking: whether `Incoming.receive` may wait. False where one thread runs several ranks: `receive` is then
            called only after `ready` returned True, so it never waits.
    """

    blocking: bool = True

    @abstractmethod
    def open(self, channels: Iterable[Channel]) -> None:
        """Open `channels`; may be called again with more. Every rank passes the same channels in the same order."""

    @abstractmethod
    def outgoing(self, channel: Channel) -> Outgoing:
        """The sending end of an open channel that starts at this rank.

        May be called several times for one channel. All ends of a channel share its state.
        """

    @abstractmethod
    def incoming(self, channel: Channel) -> Incoming:
        """The receiving end of an open channel that ends at this rank.

        May be called several times for one channel. All ends of a channel share its state.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Called after every step. Returns when the messages sent so far need nothing more from this process.

        Raises:
            PeerLost: a receiver ended before it had taken its messages.
        """

    @abstractmethod
    def close(self) -> None:
        """Close all channels; messages already sent still arrive. Closing twice does nothing."""


class OneProcessTransport(Transport):
    """One object that carries the messages of all ranks, which share this process.

    Where it is `blocking`, each rank has a thread and calls its own ends at the same time as the others: state that the
    ends share needs a lock. A wrapper of such a transport extends this class, and forwards `blocking` and every method.
    """

    def place(self, devices: Mapping[int, Device]) -> None:
        """Called once before messages are sent: where each rank computes. Messages arrive there."""

    @abstractmethod
    def interrupt(self, source: int) -> None:
        """Wake all ranks that wait for rank `source` with PeerLost. Called only where `blocking`."""
