"""Results of the last stage on the ranks that want them: losses on every rank, outputs on ranks with the last stage."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from pipeloom.ir import Schedule
from pipeloom.transport.interface import Channel, Incoming, Lane, Transport
from pipeloom.transport.values import Value, flatten, unflatten


class ResultExchange:
    """One process's part in sharing the results of the last stage.

    Args:
        rank: this process's rank; None where it holds all ranks, and no result has to travel.
        schedule: says where the last stage runs.
        transport: with `channels` open.

    Attributes:
        holders: the ranks with the last stage.
    """

    def __init__(self, rank: int | None, schedule: Schedule, transport: Transport) -> None:
        self._rank, self._schedule, self._transport = rank, schedule, transport
        self.holders = schedule.placement.replicas[-1]

    def channels(self) -> set[Channel]:
        """The channels of all ranks."""
        if self._rank is None:
            return set()
        ranks = range(self._schedule.num_ranks)
        return {Channel(holder, peer, Lane.RESULT) for holder in self.holders for peer in ranks if peer != holder}

    def share(self, results: dict[int, Value], num_microbatches: int, *, everywhere: bool) -> None:
        """Send this rank's `results` to others, and add theirs: then it has those of all micro-batches.

        Args:
            results: by micro-batch.
            num_microbatches: of the call.
            everywhere: to and on all ranks, or only those with the last stage.
        """
        rank = self._rank
        if rank is None or not (everywhere or rank in self.holders):
            return
        if rank in self.holders:
            self.send(results, range(self._schedule.num_ranks) if everywhere else self.holders)
        for holder in self.holders:
            if holder != rank:
                results.update(self.receive(holder, range(num_microbatches)))

    def send(self, results: Mapping[int, Value], peers: Iterable[int]) -> None:
        """Send `results`, by micro-batch, to those of `peers` that are other ranks. Does not wait."""
        assert self._rank is not None
        own = flatten(tuple(results[b] for b in sorted(results)))
        for peer in peers:
            if peer != self._rank:
                self._transport.outgoing(Channel(self._rank, peer, Lane.RESULT)).send(*own)

    def ready(self, holder: int) -> bool:
        """Whether `receive` would return at once."""
        return self._incoming(holder).ready()

    def receive(self, holder: int, microbatches: Iterable[int]) -> dict[int, Value]:
        """What rank `holder` sent of those of `microbatches` whose last stage runs there."""
        message = self._incoming(holder).receive()
        place, last = self._schedule.placement.rank_of, self._schedule.num_stages - 1
        held = (b for b in microbatches if place(last, b) == holder)
        return dict(zip(held, unflatten(message.layout, message.tensors), strict=True))

    def _incoming(self, holder: int) -> Incoming:
        assert self._rank is not None
        return self._transport.incoming(Channel(holder, self._rank, Lane.RESULT))


def total(losses: dict[int, Tensor]) -> Tensor:
    """The sum in order of micro-batches: the same bits on every rank."""
    ordered = [losses[b] for b in sorted(losses)]
    result = ordered[0].clone()
    for loss in ordered[1:]:
        result += loss
    return result.reshape(())
