"""Links of a cluster that the processes of a mesh axis use: their bandwidth and latency. No torch here.

Devices are numbered through node after node. `stride` is the distance between neighbours along an axis. A ring of
processes enters and leaves every node once; where it crosses nodes, the rings of all devices of a node share its
network:

    inside a node    bandwidth of a device, at most that of its direct links to the others
    between nodes    network of the node / number of rings in a node, at most the bandwidth of a device inside
    all-to-all       between nodes: network of the node / devices of a node, for what goes to other nodes
    message          between nodes: the same, at most one network card per device. What a device sends to the next
                     stage and what it returns to the one before leave through the same card, one after the other
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.costs.measured_links import measured_ring
from pipeloom.sim import Network
from pipeloom.sim.network import Link, Pair

ORDER = ("dp", "pp", "cp", "tp")  # mesh axes, outermost first, as a run orders them by default


def strides(degrees: Mapping[str, int], order: Sequence[str] = ORDER) -> dict[str, int]:
    """The distance between neighbours along each axis.

    Args:
        degrees: by axis.
        order: all axes, outermost first.
    """
    found, distance = {}, 1
    for axis in reversed(order):
        found[axis] = distance
        distance *= degrees.get(axis, 1)
    return found


def ring_link(cluster: Cluster, stride: int, degree: int, *, sums: bool = False) -> LinkRate:
    """The link of each of `degree` devices, `stride` apart, of a ring, while all other such rings are in use too.

    Args:
        sums: whether the ring reduces, for which a cluster may have a measured bandwidth.
    """
    if cluster.measured is not None:
        return measured_ring(cluster, sums=sums)
    inside, network, node = cluster.inside_node, cluster.between_nodes, cluster.devices_per_node
    here = max(1, min(degree, node // stride))  # of the ring, in a node
    near = min(inside.bytes_per_second, max(1, here - 1) * inside.pair_bytes_per_second)
    if stride * degree <= node:
        return LinkRate(bytes_per_second=cluster.link_part * near, latency_seconds=inside.latency_seconds)
    rings = min(stride, node)
    rate = cluster.link_part * network.bytes_per_second
    if sums and network.sum_bytes_per_second is not None:
        rate = network.sum_bytes_per_second
    if here > 1:
        rate = min(rate, rings * cluster.link_part * near)
    flow = cluster.link_part * network.bytes_per_second / node
    if degree > here:
        flow *= (degree - 1) / (degree - here)
    if here > 1:  # meanwhile the others of the node are sent to
        flow = min(flow, cluster.link_part * near * (degree - 1) / (here - 1))
    return LinkRate(bytes_per_second=rate / rings, latency_seconds=network.latency_seconds, flow_bytes_per_second=flow)


class MessageLink(NamedTuple):
    """A link between two devices, in one direction."""

    bytes_per_second: float
    latency_seconds: float


def message_link(cluster: Cluster, *, crosses: bool, at_once: int = 1) -> MessageLink:
    """The link of a message between two devices of a node, or of two nodes.

    Args:
        cluster: that they are in.
        crosses: whether it goes to another node.
        at_once: messages that leave a node at the same time, and share its network.
    """
    inside, network = cluster.inside_node, cluster.between_nodes
    if not crosses:
        return MessageLink(cluster.link_part * inside.pair_bytes_per_second, inside.latency_seconds)
    rate = network.sum_bytes_per_second or cluster.link_part * network.bytes_per_second
    return MessageLink(rate / max(network.cards, at_once), network.latency_seconds)


def data_links(cluster: Cluster, *, stride: int, replicas: int) -> dict[str, Any]:
    """Links between data-parallel replicas and to host memory, as keyword arguments of `pipeloom.sim.Network`.

    Args:
        cluster: the cluster they run on.
        stride: devices from one replica's process to the next one's.
        replicas: data-parallel degree.
    """
    gathers, sums = (ring_link(cluster, stride, replicas, sums=each) for each in (False, True))
    found: dict[str, Any] = {
        "data_bytes_per_second": gathers.bytes_per_second,
        "data_sum_bytes_per_second": sums.bytes_per_second,
        "data_latency_seconds": gathers.latency_seconds,
    }
    if cluster.host_rate is not None:
        found["memory_bytes_per_second"] = cluster.host_rate
    return found


def pipeline_network(cluster: Cluster, *, ranks: int, stride: int, waits: bool = False, **others: Any) -> Network:
    """The links between stages, where neighbours in the pipeline are `stride` devices apart.

    Messages of both directions that leave a node through the same network cards take turns.

    Args:
        waits: whether ranks compute nothing while they exchange messages. They send and receive at the same time, so
            that each of the two directions counts for half the time.
        others: further arguments of `Network`.
    """
    others["overlap_communication"] = not waits
    rate = 2 if waits else 1
    node = cluster.devices_per_node
    near, far = (message_link(cluster, crosses=each, at_once=min(stride, node)) for each in (False, True))
    at = [rank * stride // node for rank in range(ranks)]
    pairs = [*pairwise(range(ranks)), *([(ranks - 1, 0)] if ranks > 2 else [])]
    crossing = [way for a, b in pairs if at[a] != at[b] for way in ((a, b), (b, a))]
    if not crossing:
        return Network(bytes_per_second=rate * near.bytes_per_second, latency_seconds=near.latency_seconds, **others)
    latencies = tuple(tuple((near if a == b else far).latency_seconds for b in at) for a in at)
    apart = 2 * stride <= cluster.between_nodes.cards  # the first and the last rank of a node have cards of their own
    cards = defaultdict[Pair | int, set[Pair]](set)  # and the messages that leave through them
    for pair in crossing:
        cards[pair if waits else pair[0] if apart else -1 - at[pair[0]]].add(pair)
    links = tuple(Link(ranks=frozenset(each), bytes_per_second=rate * far.bytes_per_second) for each in cards.values())
    return Network(bytes_per_second=rate * near.bytes_per_second, latency_seconds=latencies, links=links, **others)
