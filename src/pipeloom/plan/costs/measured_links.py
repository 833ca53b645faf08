"""Messages and collectives of a machine whose tables were measured (`pipeloom.plan.local`). No torch here.

A sender copies its message into memory that its receiver reads, so it is busy for the bytes of the message too. Threads
of collectives need cores that computations would use.
"""

from dataclasses import replace
from typing import Any

from pipeloom.ir import DataStrategy
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.local.measured import Measured, Rates
from pipeloom.sim import Network
from pipeloom.sim.data_link import slowdown

_SMALL = 1024.0  # bytes of the sums over processes that end a step


def _together(measured: Measured, processes: int) -> Rates | None:
    """The entry with collectives whose number of processes is nearest from above; None where there is none."""
    several = [each for each in measured.rates if each.processes > 1 and "all_reduce" in each.curves]
    return next((each for each in several if each.processes >= processes), several[-1] if several else None)


def without_collectives(cluster: Cluster) -> Cluster:
    """A measured machine whose collectives take no time."""
    assert cluster.measured is not None
    rates = tuple(
        replace(each, curves={name: curve for name, curve in each.curves.items() if not name.startswith("all_")})
        for each in cluster.measured.rates
    )
    return replace(cluster, measured=replace(cluster.measured, rates=rates))


def measured_ring(cluster: Cluster, *, sums: bool) -> LinkRate:
    """The link of a ring: the figures with which its formula gives the measured collectives."""
    assert cluster.measured is not None
    rates = _together(cluster.measured, cluster.processes)
    if rates is None:
        return LinkRate()
    times, curve = (2, rates.curves["all_reduce"]) if sums else (1, rates.curves["all_gather"])
    messages = times * (rates.processes - 1)
    (_, least), (size, most) = curve[0], curve[-1]
    latency = least / messages
    left = max(most - least, most / 100)
    return LinkRate(bytes_per_second=messages / rates.processes * size / left, latency_seconds=latency)


def shared_links(cluster: Cluster, strategy: DataStrategy, *, has_masters: bool) -> dict[str, Any]:
    """What replicas exchange through shared memory, as arguments of `Network` that replace those of collectives.

    Replicas send each other segments of gradients. They read full parameters in place, which the optimizer updates
    there unless there are master parameters.
    """
    assert cluster.measured is not None
    rates = _together(cluster.measured, cluster.processes)
    if rates is None or "message" not in rates.curves or not strategy.shards_optimizer or strategy.has_server:
        return {}
    curve = rates.curves["message"]
    (small, least), (large, most) = curve[0], curve[-1]
    found: dict[str, Any] = {"data_sum_bytes_per_second": (large - small) / max(most - least, most / 100)}
    if strategy.shards_parameters and not has_masters:
        found |= {"data_bytes_per_second": None, "data_latency_seconds": least}
    return found


def measured_network(cluster: Cluster, message_bytes: float, data: dict[str, Any]) -> Network:
    """Links between stages whose messages have `message_bytes`, and `data` links between replicas."""
    measured = cluster.measured
    assert measured is not None
    rates = _together(measured, cluster.processes)
    if rates is None:
        return Network(**data)
    send, receive = rates.seconds["send"], rates.seconds["receive"]
    least, seconds = rates.curve("message", 1.0), rates.curve("message", message_bytes)
    busy = min(measured.cores, cluster.processes)
    lost = slowdown(busy, cluster.processes * rates.seconds.get("collectives", 0.0), measured.cores)
    return Network(
        send_seconds=send + max(0.0, seconds - least),
        receive_seconds=receive,
        latency_seconds=max(0.0, least - send - receive),
        data_slowdown=min(lost, 0.95),
        **data,
    )


def slower_network(network: Network, times: float) -> Network:
    """All of a measured network's seconds `times` as long."""
    if times == 1.0:
        return network
    rates = network.data_bytes_per_second, network.data_sum_bytes_per_second
    gathers, sums = (None if rate is None else rate / times for rate in rates)
    assert isinstance(network.latency_seconds, float | int)
    return replace(
        network,
        latency_seconds=times * network.latency_seconds,
        send_seconds=times * network.send_seconds,
        receive_seconds=times * network.receive_seconds,
        data_latency_seconds=times * network.data_latency_seconds,
        data_bytes_per_second=gathers,
        data_sum_bytes_per_second=sums,
    )


def exchange_seconds(cluster: Cluster, size: float) -> float:
    """Seconds in which two processes send each other `size` bytes over the transport of pipelines."""
    rates = None if cluster.measured is None else _together(cluster.measured, cluster.processes)
    return 0.0 if rates is None else rates.curve("message", size) + rates.seconds["receive"]


def step_end_seconds(cluster: Cluster, *, replicas: int) -> float:
    """Seconds of the small sums over processes with which a step ends: of norms, of losses, and between replicas."""
    rates = None if cluster.measured is None else _together(cluster.measured, cluster.processes)
    if rates is None or cluster.processes == 1:
        return 0.0
    return (3 if replicas > 1 else 2) * rates.curve("all_reduce", _SMALL)
