"""Gradients of a stage with replicas, exchanged while the stream goes on.

A replica sends the sum of its backwards of one update to the others and runs its next micro-batch meanwhile. Before it
updates it has what all others sent, and adds in order of replicas: all copies get the same bits.

With all gradients go the learning rates that a function gives for the update: replicas must have the same. With the
first of a run go a few values of every parameter, by which replicas notice that their copies differ, and with the last
the buffers, such as running statistics: after a run all copies are those of the first replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.gradient_sum import check_alike, sample, sum_in_order
from pipeloom.engine.stores.shared_buffers import SharedBuffers
from pipeloom.errors import CallerError, RunError
from pipeloom.training.stream.weight_versions import Gradients
from pipeloom.transport.call_numbers import call_name, call_only
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten, unflatten


class Mailbox:
    """What one peer sent in the gradient lane, for whichever stage and update.

    Args:
        rank: this rank.
        peer: the other one.
        transport: with the lane open in both directions.
        call: the number of this run.
    """

    def __init__(self, rank: int, peer: int, transport: Transport, call: int) -> None:
        self.peer = peer
        self._outgoing = transport.outgoing(Channel(rank, peer, Lane.GRADIENT))
        self._incoming = transport.incoming(Channel(peer, rank, Lane.GRADIENT))
        self._call = call_only(call)
        self._arrived: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def send(self, stage: int, update: int, content: tuple[Any, ...]) -> None:
        key = torch.tensor([stage, update])  # as a tensor: messages of all updates have one layout
        self._outgoing.send(*flatten((key, *content), "gradients to be summed hold"), self._call)

    def ready(self, stage: int, update: int) -> bool:
        """Whether `take` would return at once."""
        while (stage, update) not in self._arrived and self._incoming.ready():
            self._receive()
        return (stage, update) in self._arrived

    def take(self, stage: int, update: int) -> tuple[Any, ...]:
        """What the peer sent; waits for it."""
        while (stage, update) not in self._arrived:
            self._receive()
        return self._arrived.pop((stage, update))

    def _receive(self) -> None:
        message = self._incoming.receive()
        if call_only(message.call) != self._call:
            raise RunError(
                f"rank {self.peer} is in {call_name(call_only(message.call))}, and this rank in "
                f"{call_name(self._call)}: every rank makes the same calls in the same order"
            )
        key, *content = unflatten(message.layout, message.tensors)
        self._arrived[tuple(key.tolist())] = tuple(content)


class ReplicaGradients:
    """One rank's part in the sums of one stage.

    Args:
        rank: this rank.
        stage: of which.
        replicas: its ranks.
        parameters: by name, in the order of the gradients.
        buffers: those that the replicas share.
        mailboxes: by peer.
        num_updates: of the run.
    """

    def __init__(
        self,
        rank: int,
        stage: int,
        replicas: Sequence[int],
        parameters: dict[str, nn.Parameter],
        buffers: SharedBuffers,
        mailboxes: dict[int, Mailbox],
        num_updates: int,
    ) -> None:
        self._rank, self._stage, self._replicas = rank, stage, replicas
        self._parameters, self._buffers = parameters, buffers
        self._mailboxes = [mailboxes[peer] for peer in replicas if peer != rank]
        self._last = num_updates - 1
        self._sample = torch.empty(0)
        self._rates: dict[int, Tensor] = {}  # by update, one for each parameter
        self._received: dict[int, Gradients] = {}
        self._values: dict[str, Tensor | None] = {}  # of buffers, from the replicas whose copies count

    def send(self, update: int, gradients: Gradients, rates: Tensor | None) -> None:
        """Send this rank's sum to the other replicas, and the rate of each parameter if a function gives it.

        Does not wait.
        """
        if rates is not None:
            self._rates[update] = rates
        if update == 0:
            self._sample = sample(self._parameters.values())
        if update == self._last:
            self._buffers.look()
        for box in self._mailboxes:
            values = self._buffers.to_send(box.peer) if update == self._last else {}
            box.send(self._stage, update, (tuple(gradients), values, self._sample if update == 0 else None, rates))

    def receives(self, update: int) -> list[Step]:
        """The functions that wait for the other replicas."""

        def bind(box: Mailbox) -> Step:
            return lambda: self._receive(box, update), lambda: box.ready(self._stage, update)

        return [bind(box) for box in self._mailboxes]

    def _receive(self, box: Mailbox, update: int) -> None:
        gradients, values, theirs, rates = box.take(self._stage, update)
        if theirs is not None:
            check_alike(self._parameters, self._sample, theirs, box.peer)
        if rates is not None:
            self._check_rates(update, rates, box.peer)
        self._received[box.peer] = list(gradients)
        self._values.update(values)

    def _check_rates(self, update: int, theirs: Tensor, peer: int) -> None:
        """Raises CallerError where a parameter is about to change at another rate there."""
        own = self._rates[update]
        if torch.equal(own, theirs):
            return
        columns = zip(self._parameters, own.tolist(), theirs.tolist(), strict=True)
        name, one, other = next(column for column in columns if column[1] != column[2])
        raise CallerError(
            f"replicas of stage {self._stage} have learning rate {one} on rank {self._rank} and {other} on rank {peer} "
            f"for parameter {name!r} in update {update}: they make the same updates; give the same learning_rate on "
            "each"
        )

    def total(self, update: int, own: Gradients) -> Gradients:
        """The sum over all replicas in their order, in new memory."""
        parts = [own if rank == self._rank else self._received.pop(rank) for rank in self._replicas]
        self._rates.pop(update, None)
        if update == self._last:
            self._buffers.take(self._values)
        return [sum_in_order([g for g in column if g is not None]) for column in zip(*parts, strict=True)]
