"""Gradients of a stage with replicas, exchanged while the stream continues.

A replica sends the sum of its backwards of one update to the others, and runs its next micro-batch meanwhile. It waits
for the sums of the others before it updates. Samples of the parameters travel with a run's first update, and buffers
such as running statistics with its last: after a run all replicas have the buffers of the first one.

The learning rates that a function returned for the update travel with the gradients. They must be equal on all
replicas.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.gradient_sum import FLATTEN_ERROR, GradientExchange, Shared
from pipeloom.engine.stores.shared_buffers import SharedBuffers
from pipeloom.errors import CallerError
from pipeloom.training.stream.weight_versions import Gradients
from pipeloom.transport.call_numbers import call_only, out_of_step
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten, unflatten


class Mailbox:
    """Messages of one peer in the gradient lane, which come for any stage and update; `call` is the run's number."""

    def __init__(self, rank: int, peer: int, transport: Transport, call: int) -> None:
        self.peer = peer
        self._outgoing = transport.outgoing(Channel(rank, peer, Lane.GRADIENT))
        self._incoming = transport.incoming(Channel(peer, rank, Lane.GRADIENT))
        self._call = call_only(call)
        self._arrived: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def send(self, stage: int, update: int, content: tuple[Any, ...]) -> None:
        key = torch.tensor([stage, update])  # as a tensor: messages of all updates have one layout
        self._outgoing.send(*flatten((key, *content), FLATTEN_ERROR), self._call)

    def ready(self, stage: int, update: int) -> bool:
        """Whether `take` would return at once."""
        while (stage, update) not in self._arrived and self._incoming.ready():
            self._receive()
        return (stage, update) in self._arrived

    def take(self, stage: int, update: int) -> tuple[Any, ...]:
        """The content that the peer sent for an update; waits for it."""
        while (stage, update) not in self._arrived:
            self._receive()
        return self._arrived.pop((stage, update))

    def _receive(self) -> None:
        message = self._incoming.receive()
        if call_only(message.call) != self._call:
            raise out_of_step(self.peer, message.call, self._call)
        key, *content = unflatten(message.layout, message.tensors)
        self._arrived[tuple(key.tolist())] = tuple(content)


class ReplicaGradients:
    """One rank's part in the sums of one stage.

    Args:
        shared: the stage's parameters and replicas, in the order of the gradients.
        buffers: those that the replicas share.
        mailboxes: by peer.
        last: the run's last update of the stage.
    """

    def __init__(
        self, rank: int, stage: int, shared: Shared, buffers: SharedBuffers, mailboxes: dict[int, Mailbox], last: int
    ) -> None:
        self._exchange = GradientExchange(rank, shared, buffers, lambda name: shared[name][0])
        self._rank, self._stage, self._names, self._last = rank, stage, list(shared), last
        self._mailboxes = {peer: mailboxes[peer] for peer in self._exchange.peers}
        self._rates: dict[int, Tensor | None] = {}  # by update, one for each parameter

    def shorten(self, last: int) -> None:
        """The run ends with an earlier update, which has not begun."""
        self._last = last

    def send(self, update: int, gradients: Gradients, rates: Tensor | None) -> None:
        """Send this rank's sum to the other replicas, and the rate of each parameter if a function gives it.

        Does not wait.
        """
        self._rates[update] = rates
        own = dict(zip(self._names, gradients, strict=True))
        for peer, content in self._exchange.messages(own, first=update == 0, last=update == self._last):
            self._mailboxes[peer].send(self._stage, update, (rates, content))

    def receives(self, update: int) -> list[Step]:
        """The functions that wait for the other replicas."""
        boxes = self._mailboxes.values()
        return [(partial(self._receive, box, update), partial(box.ready, self._stage, update)) for box in boxes]

    def _receive(self, box: Mailbox, update: int) -> None:
        rates, content = box.take(self._stage, update)
        self._exchange.take(box.peer, content)
        own = self._rates[update]
        if rates is not None and own is not None and not torch.equal(own, rates):
            rows = zip(self._names, own.tolist(), rates.tolist(), strict=True)
            name, one, other = next(row for row in rows if row[1] != row[2])
            raise CallerError(
                f"replicas of stage {self._stage} have learning rate {one} on rank {self._rank} and {other} on rank "
                f"{box.peer} for parameter {name!r} in update {update}: replicas must make the same updates. Give the "
                "same learning_rate on each."
            )

    def total(self, update: int, own: Gradients) -> Gradients:
        """The sum over all replicas in their order, in new memory."""
        del self._rates[update]
        sums = self._exchange.total(dict(zip(self._names, own, strict=True)), last=update == self._last)
        return [sums[name] for name in self._names]
