"""A cluster described by data-sheet figures, as a JSON file.

    {"name": "p3.16xlarge", "devices_per_node": 8,
     "device": {"name": "V100-SXM2-16GB", "operations_per_second": 125e12, "memory_bytes_per_second": 900e9,
                "launch_seconds": 1e-5},
     "inside_node": {"bytes_per_second": 150e9, "pair_bytes_per_second": 25e9, "latency_seconds": 3e-6},
     "between_nodes": {"bytes_per_second": 3.125e9, "latency_seconds": 5e-5, "sum_bytes_per_second": 1.875e9},
     "efficiency": 0.75}

`device` may have `host_bytes_per_second`, the bandwidth to host memory, for offloaded activations.

All rates are peak rates except `sum_bytes_per_second`, which is measured with collectives. `efficiency` is the fraction
of the peak rates that programs reach; data sheets do not list it.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Any

from pipeloom.common.json_reader import Entry, read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: shown in output.
        operations_per_second: peak of matrix multiplications, in the data type of training.
        memory_bytes_per_second: bandwidth of device memory.
        launch_seconds: host time per kernel launch.
        host_bytes_per_second: bandwidth to host memory; None if unknown.
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
        bytes_per_second: bandwidth of one device over all its links together, in one direction.
        pair_bytes_per_second: bandwidth between two devices.
        latency_seconds: latency per message.
    """

    bytes_per_second: float
    pair_bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNetwork:
    """Links from one node to all other nodes together, in one direction.

    Attributes:
        bytes_per_second: bandwidth of messages.
        latency_seconds: latency per message.
        sum_bytes_per_second: measured bandwidth of ring all-reduces, which the slowest socket limits. Default:
            `bytes_per_second`.
    """

    bytes_per_second: float
    latency_seconds: float
    sum_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes. Programs reach the fraction `efficiency` of the peak rates."""

    name: str
    devices_per_node: int
    device: Device
    inside_node: NodeLinks
    between_nodes: NodeNetwork
    efficiency: float


def _node_of_eight(name: str, operations: float, memory: float, nvlink: float, network: float) -> Cluster:
    """Eight devices per node; `nvlink` per device and `network` per node, in bytes per second and direction."""
    return Cluster(
        name=name,
        devices_per_node=8,
        device=Device(
            name=name,
            operations_per_second=operations,
            memory_bytes_per_second=memory,
            launch_seconds=5e-6,
            host_bytes_per_second=25e9,
        ),
        inside_node=NodeLinks(bytes_per_second=nvlink, pair_bytes_per_second=nvlink, latency_seconds=3e-6),
        between_nodes=NodeNetwork(bytes_per_second=network, latency_seconds=1e-5),
        efficiency=0.65,
    )


# Data-sheet figures, in the data type bf16; a node has eight network cards.
CLUSTERS = {
    "a100": _node_of_eight("a100", 312e12, 2.039e12, 300e9, 8 * 25e9),
    "h100": _node_of_eight("h100", 989e12, 3.35e12, 450e9, 8 * 50e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate:
    """One device's link to another one that it shares a stage with, in one direction.

    Attributes:
        bytes_per_second: bandwidth; None for no limit.
        latency_seconds: latency per message.
    """

    bytes_per_second: float | None = None
    latency_seconds: float = 0.0


def device_link(cluster: Cluster, devices: int) -> LinkRate:
    """The link of a device among `devices` that follow each other, all of which send at the same time.

    Within a node, a device has the bandwidth of its links. Devices of different nodes share the network of their nodes
    with all others there.
    """
    inside, network = cluster.inside_node, cluster.between_nodes
    if devices <= cluster.devices_per_node:
        return LinkRate(
            bytes_per_second=cluster.efficiency * inside.bytes_per_second, latency_seconds=inside.latency_seconds
        )
    rate = cluster.efficiency * network.bytes_per_second / cluster.devices_per_node
    return LinkRate(bytes_per_second=rate, latency_seconds=network.latency_seconds)


def data_links(cluster: Cluster, *, devices: int, replicas: int) -> dict[str, Any]:
    """Links between data-parallel replicas and to host memory, as keyword arguments of `pipeloom.sim.Network`.

    Replicas run on different nodes unless all of them fit into one node. All devices of a node share its network.

    Args:
        cluster: the cluster they run on.
        devices: devices per replica.
        replicas: data-parallel degree.
    """
    inside, network, sharing = cluster.inside_node, cluster.between_nodes, min(cluster.devices_per_node, devices)
    if devices * replicas <= cluster.devices_per_node:
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


def parse_cluster(text: str) -> Cluster:
    """Read the JSON of a cluster file.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the key and the rule.
    """
    cluster: Cluster = _read(Cluster, read_json(text, "the cluster file", "an object with name, device, ..."))
    return cluster


def _read(kind: Any, entry: Entry) -> Any:
    required = [field.name for field in fields(kind) if field.default is MISSING]
    optional = [field.name for field in fields(kind) if field.default is not MISSING]
    sections = {"device": Device, "inside_node": NodeLinks, "between_nodes": NodeNetwork}
    values: dict[str, Any] = {}
    for name, value in entry.fields(required, optional).items():
        if name in sections:
            values[name] = _read(sections[name], value)
        elif name == "name":
            values[name] = value.text()
        elif name == "devices_per_node":
            values[name] = value.whole(least=1)
        elif name == "efficiency":
            values[name] = value.number(above=True, most=1)
        else:
            values[name] = value.number(above=not name.endswith("_seconds"))  # a latency may be 0
    return kind(**values)
