"""The loss of a step, the same bits on every rank: those with the last stage tell all others."""

from __future__ import annotations

from torch import Tensor

from pipeloom.ir import Schedule
from pipeloom.runtime.state import Batch
from pipeloom.runtime.transport import Channel, Lane, Transport
from pipeloom.runtime.values import flatten


class LossExchange:
    """One process's part in sharing losses.

    Args:
        rank: this process's rank; None where it holds all ranks, and nothing has to travel.
        schedule: which says where the last stage runs.
        transport: with `channels` open.
    """

    def __init__(self, rank: int | None, schedule: Schedule, transport: Transport) -> None:
        self._rank = rank
        self._schedule = schedule
        self._transport = transport
        self._holders = schedule.placement.replicas[-1]

    def channels(self) -> set[Channel]:
        """The channels of all ranks."""
        if self._rank is None:
            return set()
        ranks = range(self._schedule.num_ranks)
        return {Channel(holder, peer, Lane.LOSS) for holder in self._holders for peer in ranks if peer != holder}

    def share(self, batch: Batch) -> None:
        """Give this rank's losses to all others, and take theirs: of all micro-batches."""
        if self._rank is None:
            return
        if self._rank in self._holders:
            own = flatten(tuple(batch.losses[b] for b in sorted(batch.losses)))
            for peer in range(self._schedule.num_ranks):
                if peer != self._rank:
                    self._transport.outgoing(Channel(self._rank, peer, Lane.LOSS)).send(*own)
        for holder in self._holders:
            if holder != self._rank:
                message = self._transport.incoming(Channel(holder, self._rank, Lane.LOSS)).receive()
                batch.losses.update(zip(self._microbatches_of(holder), message.tensors, strict=True))

    def _microbatches_of(self, holder: int) -> list[int]:
        """The micro-batches whose last stage runs on rank `holder`."""
        place, last = self._schedule.placement.rank_of, self._schedule.num_stages - 1
        return [b for b in range(self._schedule.num_microbatches) if place(last, b) == holder]

    def total(self, batch: Batch) -> Tensor:
        """The sum in order of micro-batches."""
        ordered = [batch.losses[b] for b in sorted(batch.losses)]
        total = ordered[0].clone()
        for loss in ordered[1:]:
            total += loss
        return total.reshape(())
