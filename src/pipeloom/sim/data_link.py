"""The link between data-parallel replicas: seconds of its collectives, and its figures from a few timed ones.

With D replicas and n bytes per stage, a ring all-gather or reduce-scatter of D - 1 rounds sends (D - 1) / D * n bytes
over each replica's link, an all-reduce twice as many (Patarasuk and Yuan, 2009). The link of a parameter server sends
(D - 1) * n bytes. Replicas are equal, so they do not wait for each other.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from pipeloom.ir import DataAxis, Op
from pipeloom.sim.network import Network


def gather_seconds(data: DataAxis, size: float, network: Network) -> float:
    """Seconds of an UNSHARD of `size` bytes of parameters."""
    return _link_seconds(data, size, network.data_bytes_per_second, network) if data.strategy.shards_optimizer else 0.0


def reduce_seconds(data: DataAxis, size: float, network: Network) -> float:
    """Seconds of a REDUCE_GRAD of `size` bytes of gradients."""
    bandwidth = network.data_sum_bytes_per_second or network.data_bytes_per_second
    seconds = _link_seconds(data, size, bandwidth, network)
    # An all-reduce is a reduce-scatter and an all-gather.
    return seconds if data.strategy.shards_optimizer else 2 * seconds


def _link_seconds(data: DataAxis, size: float, bytes_per_second: float | None, network: Network) -> float:
    """Seconds of a ring all-gather or reduce-scatter of `size` bytes, or of a server's messages to all or from all."""
    others = data.degree - 1
    ring = others / data.degree * size, others
    sent, messages = (others * size, min(others, 1)) if data.strategy.has_server else ring
    transfer = 0.0 if bytes_per_second is None else sent / bytes_per_second
    return transfer + messages * network.data_latency_seconds


class TimedCollective(NamedTuple):
    """The time of one collective, without other traffic.

    Attributes:
        op: UNSHARD or REDUCE_GRAD.
        num_bytes: size of the full parameters or gradients.
        seconds: its duration.
        cpu_seconds: CPU time of this process.
    """

    op: Op
    num_bytes: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class DataLink:
    """The data link's attributes of `pipeloom.sim.Network`, without the prefix ``data_``.

    Attributes:
        bytes_per_second: bandwidth of all-gathers; None if they take no time, or there are none.
        sum_bytes_per_second: bandwidth of reductions.
        latency_seconds: latency per message.
        slowdown: fraction of speed that computations lose while the link is busy.
    """

    bytes_per_second: float | None = None
    sum_bytes_per_second: float | None = None
    latency_seconds: float = 0.0
    slowdown: float = 0.0

    def network(self) -> dict[str, Any]:
        """The arguments of `Network`."""
        return {f"data_{name}": value for name, value in vars(self).items()}


def fit_data_link(data: DataAxis, timed: Iterable[TimedCollective], slowdown: float = 0.0) -> DataLink:
    """Fit a link such that the formulas of this module give the seconds of the largest collectives.

    The latency is the mean over ops of the estimate from two sizes, at least 0.

    Args:
        data: the data axis.
        timed: collectives of at least two sizes per op.
        slowdown: see `DataLink`.
    """
    timed = list(timed)
    forms = {Op.UNSHARD: gather_seconds, Op.REDUCE_GRAD: reduce_seconds}
    latencies, largest = [], {}
    for op, form in forms.items():
        found = sorted((each.num_bytes, each.seconds) for each in timed if each.op is op)
        messages = form(data, 0.0, Network(data_latency_seconds=1.0))  # that follow each other
        if not found or not messages:
            continue
        (small, least), (large, most) = found[0], found[-1]
        largest[op] = (large, most, messages)
        if large > small:
            latencies.append(max(0.0, least - (most - least) / (large - small) * small) / messages)
    latency = fmean(latencies) if latencies else 0.0
    rates: dict[Op, float | None] = {}
    for op, (size, seconds, messages) in largest.items():
        through = forms[op](data, size, Network(data_bytes_per_second=1.0))  # bytes over each replica's link
        left = seconds - messages * latency
        rates[op] = through / left if left > 0 and through else None
    return DataLink(
        bytes_per_second=rates.get(Op.UNSHARD),
        sum_bytes_per_second=rates.get(Op.REDUCE_GRAD),
        latency_seconds=latency,
        slowdown=slowdown,
    )


def slowdown(computing: float, collectives: float, cores: float) -> float:
    """The fraction of speed that computations of a machine lose while collectives overlap with them.

    Args:
        computing: cores that computations use if available.
        collectives: cores that the collectives of all processes of the machine use.
        cores: cores of the machine.
    """
    if not computing or not cores:
        return 0.0
    left = min(computing, max(0.0, cores - collectives))
    return 1 - left / min(computing, cores)
