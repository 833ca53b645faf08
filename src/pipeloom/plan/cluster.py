"""A cluster in figures from data sheets, as a JSON file.

    {"name": "p3.16xlarge", "devices_per_node": 8,
     "device": {"name": "V100-SXM2-16GB", "operations_per_second": 125e12, "memory_bytes_per_second": 900e9,
                "launch_seconds": 1e-5},
     "inside_node": {"bytes_per_second": 150e9, "pair_bytes_per_second": 25e9, "latency_seconds": 3e-6},
     "between_nodes": {"bytes_per_second": 3.125e9, "latency_seconds": 5e-5, "sum_bytes_per_second": 1.875e9},
     "efficiency": 0.75}

`device` may have `host_bytes_per_second`, to the memory of its host, where activations can go.

All rates are peaks but `sum_bytes_per_second`, which collectives were measured to reach. `efficiency` is the part of
every peak that programs reach: the one figure that no data sheet has.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar

from pipeloom.common.json_reader import Entry, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: for people.
        operations_per_second: multiplications and additions of matrices, in the type that is trained in.
        memory_bytes_per_second: of its own memory.
        launch_seconds: what starting one kernel costs the host.
        host_bytes_per_second: to and from the memory of its host; None where it is not known.
    """

    name: str
    operations_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float
    host_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLinks:
    """Links between the devices of a node.

    Attributes:
        bytes_per_second: that one device sends over all its links at once, in one direction.
        pair_bytes_per_second: from one device to one other.
        latency_seconds: of a message.
    """

    bytes_per_second: float
    pair_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What a node sends to all others together, in one direction.

    Attributes:
        bytes_per_second: of messages.
        latency_seconds: of a message.
        sum_bytes_per_second: of rings that sum gradients, as measured: the slowest of all sockets decides. Left out:
            the rate of messages.
    """

    bytes_per_second: float
    latency_seconds: float
    sum_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes that are all alike. Rates are peaks where nothing else is said; programs reach `efficiency` of each."""

    name: str
    devices_per_node: int
    device: Device
    inside_node: NodeLinks
    between_nodes: Network
    efficiency: float


def links_beside(cluster: Cluster, *, devices: int, copies: int) -> dict[str, Any]:
    """What `pipeloom.sim.Network` has of links beside the ranks, by its names; those that are not known are left out.

    Copies live in different nodes unless all of them fit into one; all devices of a node then share its network.

    Args:
        cluster: where they run.
        devices: of one copy.
        copies: how many.
    """
    inside, network, sharing = cluster.inside_node, cluster.between_nodes, min(cluster.devices_per_node, devices)
    if devices * copies <= cluster.devices_per_node:
        rate = total = cluster.efficiency * inside.bytes_per_second
        latency = inside.latency_seconds
    else:
        rate = cluster.efficiency * network.bytes_per_second / sharing
        total = (network.sum_bytes_per_second or network.bytes_per_second) / sharing
        latency = network.latency_seconds
    found = {"data_bytes_per_second": rate, "data_sum_bytes_per_second": total, "data_latency_seconds": latency}
    if cluster.device.host_bytes_per_second is not None:
        found["memory_bytes_per_second"] = cluster.efficiency * cluster.device.host_bytes_per_second
    return found


Part = TypeVar("Part", Cluster, Device, NodeLinks, Network)
_PARTS: dict[str, Any] = {"device": Device, "inside_node": NodeLinks, "between_nodes": Network}


def parse_cluster(text: str) -> Cluster:
    """Read the JSON of a cluster file.

    Raises:
        InputError: it is not one; the message names the key and the rule.
    """
    return _read(Cluster, read_json(text, "the cluster file", "an object with name, device, ..."))


def _read(kind: type[Part], entry: Entry) -> Part:
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    required = [field.name for field in fields(kind) if field.name not in optional]
    return kind(**{name: _value(name, value) for name, value in entry.fields(required, sorted(optional)).items()})


def _value(name: str, entry: Entry) -> Any:
    if name in _PARTS:
        return _read(_PARTS[name], entry)
    if name == "name":
        return entry.text()
    if name == "devices_per_node":
        return entry.whole(least=1)
    if name == "efficiency":
        return entry.number(above=True, most=1)  # a part of the peaks
    return entry.number(above=not name.endswith("_seconds"))  # a latency may be 0
