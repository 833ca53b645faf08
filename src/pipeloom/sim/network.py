"""What messages between ranks cost: latency, bandwidth, and links that several pairs of ranks share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from operator import add

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir.schedule import Schedule
from pipeloom.sim.costs import MOST, Costs, check_seconds

Pair = tuple[int, int]  # source and target rank


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link that several directed pairs of ranks share, such as the network card of a node.

    Attributes:
        ranks: the pairs ``(source, target)`` whose messages go over it, one after the other.
        bytes_per_second: its bandwidth.

    Raises:
        InputError: no pairs, a rank paired with itself, or an impossible bandwidth.
    """

    ranks: frozenset[Pair]
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bandwidth(self.bytes_per_second)
        if not self.ranks:
            raise InputError("a link joins no ranks: name the pairs of source and target whose messages it carries")
        for source, target in self.ranks:
            if source == target:
                raise InputError(f"a link joins rank {source} with itself: messages go to other ranks; drop the pair")


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a message between ranks costs.

    A message is ready when the computation (or the SEND of a program) ends. Then it is transferred over its link, which
    takes its bytes over the link's bandwidth; a link transfers one message after the other, in the order in which they
    get ready (at the same moment: lower rank first). It arrives `latency_seconds` after its transfer.

    Attributes:
        latency_seconds: from the end of the send to the arrival; a number, or ``latency_seconds[source][target]``.
            No rank or link is busy in this time.
        send_seconds: time for which a SEND action keeps its rank busy.
        receive_seconds: time for which a RECV action keeps its rank busy once the message is there.

        bytes_per_second: bandwidth of each directed pair of ranks that is in none of `links`; None for no limit.
        links: links that several pairs share.
        data_bytes_per_second: bandwidth of each rank to the same rank of other replicas; None for no limit.
        data_sum_bytes_per_second: the same, while gradients are summed; as `data_bytes_per_second` if None.
        data_latency_seconds: of one message between them.
        data_slowdown: fraction of speed that a computation loses while the data link of its rank is busy: nothing (0)
            where the network does it all, up to everything (1) where collectives need the cores that compute.
        memory_bytes_per_second: between each rank's memory and the slower one to which it moves activations; None for
            no limit. See `pipeloom.sim.background` for what goes over these two.
        overlap_communication: whether links work while ranks compute. If not, the sender is busy until its message is
            transferred, and the receiver for the time of the transfer once that has come to it, before it computes.

    In a `Schedule`, which has no SEND and RECV actions, sending and receiving keep a rank busy in the last case alone.

    Raises:
        InputError: a time or bandwidth is impossible, or a pair is in two links.
    """

    latency_seconds: float | tuple[tuple[float, ...], ...] = 0.0
    send_seconds: float = 0.0
    receive_seconds: float = 0.0
    bytes_per_second: float | None = None
    links: tuple[Link, ...] = ()
    overlap_communication: bool = True
    data_bytes_per_second: float | None = None
    data_sum_bytes_per_second: float | None = None
    data_latency_seconds: float = 0.0
    data_slowdown: float = 0.0
    memory_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_seconds("send_seconds", self.send_seconds)
        check_seconds("receive_seconds", self.receive_seconds)
        rows = self.latency_seconds if isinstance(self.latency_seconds, tuple) else ((self.latency_seconds,),)
        for row in rows:
            for seconds in row:
                check_seconds("latency_seconds", seconds)
        check_seconds("data_latency_seconds", self.data_latency_seconds)
        if not 0 <= self.data_slowdown <= 1:
            raise InputError(
                f"data_slowdown={self.data_slowdown}: must be the fraction of speed that computations lose, 0 to 1."
            )
        beside = (self.data_bytes_per_second, self.data_sum_bytes_per_second, self.memory_bytes_per_second)
        for bandwidth in (self.bytes_per_second, *beside):
            if bandwidth is not None:
                _check_bandwidth(bandwidth)
        seen: set[Pair] = set()
        for link in self.links:
            if seen & link.ranks:
                raise InputError(f"ranks {min(seen & link.ranks)} are in two links: a pair uses one; drop the other")
            seen |= link.ranks

    @property
    def limited(self) -> bool:
        """Whether some messages take time for their bytes."""
        return bool(self.links) or self.bytes_per_second is not None

    def shared_links(self, num_ranks: int) -> dict[Pair, int]:
        """For each directed pair that is in one of `links`, the number of that link.

        Raises:
            InputError: a link joins a rank that is not there.
        """
        for number, link in enumerate(self.links):
            for pair in sorted(link.ranks):
                if not all(0 <= rank < num_ranks for rank in pair):
                    raise InputError(f"link {number} joins ranks {pair}: ranks must be in 0..{num_ranks - 1}.")
        return {pair: number for number, link in enumerate(self.links) for pair in link.ranks}

    def latency(self, num_ranks: int) -> tuple[tuple[float, ...], ...]:
        """``latency[source][target]`` in seconds, shape (num_ranks, num_ranks)."""
        table = self.latency_seconds
        if not isinstance(table, tuple):
            return ((table,) * num_ranks,) * num_ranks
        if len(table) != num_ranks or any(len(row) != num_ranks for row in table):
            raise InputError(
                f"latencies have rows of {[len(row) for row in table]} entries: {num_ranks} ranks need a "
                f"{num_ranks} x {num_ranks} table; add or drop entries"
            )
        return table

    def message_seconds(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
        """``[source][target]``: the latency, and what the pair's smallest message takes on its link when that is free.

        An order that is made to measure can count on it; `simulate` adds the waits for each other's messages.
        """
        return tuple(
            tuple(map(add, latencies, transfers))
            for latencies, transfers in zip(
                self.latency(schedule.num_ranks), self.transfer_seconds(schedule, costs), strict=True
            )
        )

    def transfer_seconds(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
        """``[source][target]``: what the pair's smallest message takes on its link when that is free."""
        ranks = schedule.num_ranks
        if not self.limited:
            return ((0.0,) * ranks,) * ranks
        shared, (there, back) = self.shared_links(ranks), costs.bytes_sent(schedule)
        smallest: dict[Pair, float] = {}
        for stage, (holders, next_holders) in enumerate(pairwise(schedule.placement.replicas)):
            for a, b in product(holders, next_holders):
                for pair, size in (((a, b), there[stage]), ((b, a), back[stage])):
                    smallest[pair] = min(size, smallest.get(pair, size))
        rows = [[0.0] * ranks for _ in range(ranks)]
        for (source, target), size in smallest.items():
            link = shared.get((source, target))
            bandwidth = self.bytes_per_second if link is None else self.links[link].bytes_per_second
            if source != target and bandwidth is not None:
                rows[source][target] = size / bandwidth
        return tuple(map(tuple, rows))

    def busy_seconds(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each stage, what its messages keep its rank busy at least: of one F, and of one B or I.

        Nothing where links work while ranks compute.
        """
        table = self.transfer_seconds(schedule, costs)
        there, back = [0.0] * schedule.num_stages, [0.0] * schedule.num_stages
        if not self.overlap_communication:
            for stage, (holders, next_holders) in enumerate(pairwise(schedule.placement.replicas)):
                pairs = list(product(holders, next_holders))
                forth = min(table[a][b] for a, b in pairs)
                returned = min(table[b][a] for a, b in pairs)
                for each in (stage, stage + 1):  # it sends, and the next receives, and the other way round
                    there[each] += forth
                    back[each] += returned
        return tuple(there), tuple(back)


def _check_bandwidth(bytes_per_second: float) -> None:
    if not 1 / MOST <= bytes_per_second < math.inf:
        raise InputError(f"bytes_per_second={bytes_per_second}: must be finite and > 0.")
