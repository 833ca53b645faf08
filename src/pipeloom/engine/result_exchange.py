"""The results of a run where they are wanted: losses on every rank, outputs on all ranks with the last stage."""

from __future__ import annotations

from torch import Tensor

from pipeloom.ir import Schedule
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import Value, flatten, unflatten


class ResultExchange:
    """One process's part in sharing what the last stage made.

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
        return {Channel(holder, peer, Lane.RESULT) for holder in self._holders for peer in ranks if peer != holder}

    def share(self, results: dict[int, Value], *, everywhere: bool) -> None:
        """Give this rank's `results` to others, and add theirs: then it has those of all micro-batches.

        Args:
            results: by micro-batch.
            everywhere: to and on all ranks, or only those with the last stage.
        """
        rank = self._rank
        if rank is None or not (everywhere or rank in self._holders):
            return
        if rank in self._holders:
            own = flatten(tuple(results[b] for b in sorted(results)))
            for peer in range(self._schedule.num_ranks) if everywhere else self._holders:
                if peer != rank:
                    self._transport.outgoing(Channel(rank, peer, Lane.RESULT)).send(*own)
        for holder in self._holders:
            if holder != rank:
                message = self._transport.incoming(Channel(holder, rank, Lane.RESULT)).receive()
                values = unflatten(message.layout, message.tensors)
                results.update(zip(self._microbatches_of(holder), values, strict=True))

    def _microbatches_of(self, holder: int) -> list[int]:
        """The micro-batches whose last stage runs on rank `holder`."""
        place, last = self._schedule.placement.rank_of, self._schedule.num_stages - 1
        return [b for b in range(self._schedule.num_microbatches) if place(last, b) == holder]


def total(losses: dict[int, Tensor]) -> Tensor:
    """The sum in order of micro-batches: the same bits on every rank."""
    ordered = [losses[b] for b in sorted(losses)]
    result = ordered[0].clone()
    for loss in ordered[1:]:
        result += loss
    return result.reshape(())
