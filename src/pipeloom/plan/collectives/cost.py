"""Seconds of a collective on a cluster, with the links of the cost model (`pipeloom.plan.costs.links`).

A round takes one latency, and the largest message over the slowest link. The ranks are neighbouring devices:

    ring    the link of a ring; a ring between nodes uses all network cards of a node
    flow    every device of a node shares the network: each has a part of it
    pairs   one message per node at a time, by one network card; inside a node, a link between two devices
    shift   as many messages per node as devices, at most the distance, which share the network
"""

from pipeloom.plan.cluster import Cluster
from pipeloom.plan.collectives.algorithms import ALGORITHMS, Algorithm, Round
from pipeloom.plan.collectives.sends import SUMMED
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.costs.links import message_link, ring_link


def link_of(round_: Round, cluster: Cluster, ranks: int, *, sums: bool) -> LinkRate:
    """The slowest link that a round uses.

    Args:
        round_: of an algorithm.
        cluster: with the ranks on neighbouring devices.
        ranks: their number.
        sums: whether they reduce.
    """
    node, far = cluster.devices_per_node, round_.distance
    if cluster.measured is not None or round_.pattern in ("ring", "flow"):
        ring = ring_link(cluster.beside(ranks), 1, ranks, sums=sums)
        flow = ring.flow_bytes_per_second if round_.pattern == "flow" else None
        return LinkRate(bytes_per_second=flow or ring.bytes_per_second, latency_seconds=ring.latency_seconds)
    alone = round_.pattern == "pairs"
    inside = ranks <= node or (alone and node % (2 * far) == 0)
    found = message_link(cluster, crosses=not inside, at_once=1 if alone else min(far, node))
    return LinkRate(**found._asdict())


def collective_seconds(algorithm: Algorithm, cluster: Cluster, ranks: int, num_bytes: float) -> float:
    """Seconds of one call.

    Args:
        algorithm: how.
        cluster: with the ranks on neighbouring devices.
        ranks: their number.
        num_bytes: of the full tensor; of an all-to-all, what one rank sends to all ranks.
    """
    seconds = 0.0
    for each in algorithm.rounds(ranks):
        link = link_of(each, cluster, ranks, sums=algorithm.collective in SUMMED)
        transfer = 0.0 if link.bytes_per_second is None else float(each.part) * num_bytes / link.bytes_per_second
        seconds += each.times * (link.latency_seconds + transfer)
    return seconds


def equal_bytes(collective: str, cluster: Cluster, ranks: int) -> float | None:
    """The size below which the tree is faster than the ring; 0: never, None: always."""
    (ring, more), (tree, most) = (
        (
            collective_seconds(each, cluster, ranks, 0.0),
            collective_seconds(each, cluster, ranks, 1e9) - collective_seconds(each, cluster, ranks, 0.0),
        )
        for each in ALGORITHMS[collective]
    )
    if most <= more:
        return None if tree < ring or most < more else 0.0
    return max(0.0, (ring - tree) / (most - more) * 1e9)
