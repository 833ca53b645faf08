"""`Network`: latency, bandwidth and shared links between ranks."""

import math
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain, pairwise, product
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
        ranks: the pairs ``(source, target)`` that use the link; it transfers one message at a time.
        bytes_per_second: the bandwidth.

    Raises:
        InputError: no pairs, a rank paired with itself, or an impossible bandwidth.
    """

    ranks: frozenset[Pair]
    bytes_per_second: float

    def __post_init__(self) -> None:
        check_fields(self)
        _check_bandwidth(self.bytes_per_second)
        if not self.ranks:
            raise InputError("a link has no ranks: must have at least one pair of source and target rank.")
        for source, target in self.ranks:
            if source == target:
                raise InputError(f"a link joins rank {source} with itself: must join different ranks. Remove the pair.")


@dataclass(frozen=True, kw_only=True)
class Network:
    """Latencies and bandwidths of messages between ranks.

    A message is ready at the end of its computation (or SEND of a program). Its transfer takes its bytes divided by the
    link's bandwidth. A link transfers one message at a time, in the order in which messages become ready (ties: lower
    rank first). The message arrives `latency_seconds` after its transfer.

    Attributes:
        latency_seconds: from the end of the send to the arrival; a number, or ``latency_seconds[source][target]``.
            No rank or link is busy in this time.
        send_seconds: time for which a SEND action keeps its rank busy.
        receive_seconds: time for which a RECV action keeps its rank busy once the message has arrived.
        bytes_per_second: bandwidth of each directed pair of ranks in none of `links`; None for no limit.
        links: links that several pairs share.
        data_bytes_per_second: bandwidth of each rank to the same rank of other replicas; None for no limit.
        data_sum_bytes_per_second: the same for gradient reductions; default: `data_bytes_per_second`.
        data_latency_seconds: latency per message between replicas.
        data_slowdown: fraction of speed that a computation loses while the data link of its rank is busy, from 0
            (collectives need no compute cores) to 1.
        memory_bytes_per_second: bandwidth between each rank and its offload target of activations; None for no limit.
            `pipeloom.sim.background` describes the data and memory links.
        overlap_communication: whether transfers overlap with computation. If not, the sender is busy until the end of
            the transfer, and the receiver for the duration of the transfer before it computes.

    A `Schedule` has no SEND and RECV actions; messages keep its ranks busy only without `overlap_communication`.

    Raises:
        InputError: an invalid time or bandwidth, or a pair in two links.
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
        for what in ("send_seconds", "receive_seconds", "data_latency_seconds"):
            check_seconds(what, getattr(self, what))
        rows = self.latency_seconds if isinstance(self.latency_seconds, tuple) else ((self.latency_seconds,),)
        for seconds in chain(*rows):
            check_seconds("latency_seconds", seconds)
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
                raise InputError(f"ranks {min(seen & link.ranks)} are in two links: must be in one. Remove the other.")
            seen |= link.ranks

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Searches look up many results by their network, whose tables are large."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    @cached_property
    def fastest(self) -> tuple[float, float]:
        """The least latency and the highest bandwidth of messages."""
        table = self.latency_seconds
        return (min(map(min, table)) if isinstance(table, tuple) else table), max(self._rates)

    @cached_property
    def slowest(self) -> tuple[float, float]:
        """The highest latency and the lowest bandwidth of messages."""
        table = self.latency_seconds
        return (max(map(max, table)) if isinstance(table, tuple) else table), min(self._rates)

    @property
    def _rates(self) -> list[float]:
        return [self.bytes_per_second or math.inf, *(link.bytes_per_second for link in self.links)]

    @property
    def limited(self) -> bool:
        """Whether some messages take time for their bytes."""
        return bool(self.links) or self.bytes_per_second is not None

    def shared_links(self, num_ranks: int) -> dict[Pair, int]:
        """For each directed pair in one of `links`, the number of the link. Raises InputError for unknown ranks."""
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
                f"latency_seconds has rows of {[len(row) for row in table]} entries: {num_ranks} ranks need a "
                f"{num_ranks} x {num_ranks} table."
            )
        return table

    def message_seconds(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
        """``[source][target]``: the latency plus the transfer time of the pair's smallest message on an idle link.

        Schedules are optimized for this lower bound; `simulate` adds waits for busy links.
        """
        rows = zip(self.latency(schedule.num_ranks), self.transfer_seconds(schedule, costs), strict=True)
        return tuple(tuple(map(add, latencies, transfers)) for latencies, transfers in rows)

    def transfer_seconds(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
        """``[source][target]``: the transfer time of the pair's smallest message on an idle link."""
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
        """For each stage, the least seconds that messages keep its rank busy per F, and per B or I.

        0 with `overlap_communication`.
        """
        table = self.transfer_seconds(schedule, costs)
        there, back = [0.0] * schedule.num_stages, [0.0] * schedule.num_stages
        holders = () if self.overlap_communication else pairwise(schedule.placement.replicas)
        for stage, pair in enumerate(holders):
            for each in (stage, stage + 1):  # it sends, and the next receives, and the other way round
                there[each] += min(table[a][b] for a, b in product(*pair))
                back[each] += min(table[b][a] for a, b in product(*pair))
        return tuple(there), tuple(back)


def _check_bandwidth(bytes_per_second: float) -> None:
    if not 1 / MOST <= bytes_per_second < math.inf:
        raise InputError(f"bytes_per_second={bytes_per_second}: must be finite and > 0.")
