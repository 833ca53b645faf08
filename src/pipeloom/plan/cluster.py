"""A cluster described by data-sheet figures, as a JSON file.

    {"name": "p3.16xlarge", "devices_per_node": 8,
     "device": {"name": "V100-SXM2-16GB", "operations_per_second": 125e12, "memory_bytes_per_second": 900e9,
                "launch_seconds": 1e-5},
     "inside_node": {"bytes_per_second": 150e9, "pair_bytes_per_second": 25e9, "latency_seconds": 3e-6},
     "between_nodes": {"bytes_per_second": 3.125e9, "latency_seconds": 5e-5, "sum_bytes_per_second": 1.875e9},
     "efficiency": 0.75}

Optional keys of `device`: `host_bytes_per_second`, the bandwidth to host memory, for offloaded activations;
`memory_bytes`, the capacity of its memory; `multiprocessors`, with which times of products depend on their shapes;
`fp32_operations_per_second`; `bfloat16`, false if only float16 is computed at the full rate; and `host_seconds`, the
host's time per kernel. `between_nodes` may have `cards`, the
number of network cards of a node. `host_memory_bytes` is the memory of a node's host, which offloaded activations use.

All rates are peak rates except `sum_bytes_per_second`, which is measured. `efficiency` is the fraction of the peaks
that programs reach; data sheets do not list it. `memory_efficiency` and `link_efficiency` are those of device memory
and of links, where they are others. `measured` has tables of a machine (`pipeloom.plan.local`), which replace the
figures of its device.
"""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Self

from pipeloom.common.json_reader import Entry, read_json
from pipeloom.plan.local.measured import Measured, Rates

_LEAST, _MOST = 1e-30, 1e30  # of rates, bytes and seconds: what is computed of them stays finite
_DEVICE_PART = 0.92  # of a device's memory: the rest is for messages, workspaces and fragments
_HOST_PART = 0.8  # of host memory: the rest is for processes, data and files


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator.

    Attributes:
        name: shown in output.
        operations_per_second: peak of matrix multiplications, in the data type of training.
        memory_bytes_per_second: bandwidth of device memory.
        launch_seconds: time per kernel beside its arithmetic and memory traffic.
        host_bytes_per_second: bandwidth to host memory; None if unknown.
        memory_bytes: capacity; None if unknown.
        multiprocessors: their number; None: times do not depend on shapes.
        fp32_operations_per_second: peak of matrix multiplications in float32; None: as other types.
        host_seconds: host time per kernel. A device that computes faster waits for its host.
        bfloat16: whether it computes bfloat16 as fast as float16. V100 does not: its tensor cores know float16 alone.
    """

    name: str
    operations_per_second: float
    memory_bytes_per_second: float
    launch_seconds: float
    host_bytes_per_second: float | None = None
    memory_bytes: float | None = None
    multiprocessors: int | None = None
    fp32_operations_per_second: float | None = None
    host_seconds: float = 0.0
    bfloat16: bool = True

    @property
    def half(self) -> str:
        """The 16-bit number format that it computes fastest, bf16 before fp16."""
        return "bf16" if self.bfloat16 else "fp16"

    def peak(self, element: int) -> float:
        """Operations per second of numbers of `element` bytes."""
        return (self.fp32_operations_per_second if element > 2 else None) or self.operations_per_second


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
            `bytes_per_second`, of which programs reach a part.
        cards: network cards of a node; a message between two devices uses one of them.
    """

    bytes_per_second: float
    latency_seconds: float
    sum_bytes_per_second: float | None = None
    cards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Equal nodes.

    Attributes:
        name: shown in output.
        devices_per_node: their number.
        device: each of them.
        inside_node, between_nodes: the links.
        efficiency: fraction of the peak rates that programs reach.
        memory_efficiency, link_efficiency: the same of device memory, and of links; None: `efficiency`.
        host_memory_bytes: of a node; None: unknown.
        measured: tables of the machine that replace figures of the device; None: there are none.
        processes: that compute side by side, for a machine with tables.
    """

    name: str
    devices_per_node: int
    device: Device
    inside_node: NodeLinks
    between_nodes: NodeNetwork
    efficiency: float
    memory_efficiency: float | None = None
    link_efficiency: float | None = None
    host_memory_bytes: float | None = None
    measured: Measured | None = field(default=None, hash=False)
    processes: int = 1

    @property
    def rates(self) -> Rates | None:
        """Tables for the processes that compute side by side; None without tables."""
        return None if self.measured is None else self.measured.of(self.processes)

    @property
    def host_rate(self) -> float | None:
        """Bytes per second between a device and its host that programs reach; None if unknown."""
        rate = self.device.host_bytes_per_second
        return None if rate is None else self.link_part * rate

    @property
    def host_bytes_per_device(self) -> float:
        """Host memory that offload may use per device; infinite if unknown."""
        return (
            math.inf if self.host_memory_bytes is None else _HOST_PART * self.host_memory_bytes / self.devices_per_node
        )

    def device_bytes(self, processes: int) -> float | None:
        """Memory of a device; of a measured machine, of each of so many processes. None if unknown."""
        memory = self.device.memory_bytes
        return memory if memory is None or self.measured is None else memory / processes

    def usable_bytes(self, processes: int) -> float:
        """The part of `device_bytes` that a plan may use; infinite if unknown."""
        memory = self.device_bytes(processes)
        return math.inf if memory is None else _DEVICE_PART * memory

    def beside(self, processes: int) -> Self:
        """The cluster while so many processes compute; one without tables is the same for any number."""
        return self if self.measured is None else replace(self, processes=processes)

    def to_json(self) -> str:
        """The text of a cluster file; `parse_cluster` reads it back."""
        values = {name: value for name, value in asdict(self).items() if value is not None and name != "processes"}
        for name in _SECTIONS:
            values[name] = {key: value for key, value in values[name].items() if value is not None}
        if self.measured is not None:
            values["measured"] = self.measured.to_mapping()
        return json.dumps(values)

    @property
    def memory_rate(self) -> float:
        """Bytes per second of device memory that programs reach."""
        return (self.memory_efficiency or self.efficiency) * self.device.memory_bytes_per_second

    @property
    def link_part(self) -> float:
        """Fraction of the bandwidth of links that programs reach."""
        return self.link_efficiency or self.efficiency


_SECTIONS = {"device": Device, "inside_node": NodeLinks, "between_nodes": NodeNetwork}


def parse_cluster(text: str) -> Cluster:
    """Read the JSON of a cluster file.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the key and the rule.
    """
    cluster: Cluster = _read(Cluster, read_json(text, "the cluster file", "an object with name, device, ..."))
    return cluster


def _read(kind: Any, entry: Entry) -> Any:
    required = [each.name for each in fields(kind) if each.default is MISSING]
    optional = [each.name for each in fields(kind) if each.default is not MISSING and each.name != "processes"]
    values: dict[str, Any] = {}
    for name, value in entry.fields(required, optional).items():
        if name in _SECTIONS:
            values[name] = _read(_SECTIONS[name], value)
        elif name == "measured":
            values[name] = Measured.read(value)
        elif name == "name":
            values[name] = value.text()
        elif name in ("devices_per_node", "multiprocessors", "cards"):
            values[name] = value.whole(least=1)
        elif name == "bfloat16":
            values[name] = value.flag()
        elif name.endswith("efficiency"):
            values[name] = value.number(above=True, most=1)
            if values[name] < _LEAST:
                value.refuse(f"must be at least {_LEAST:g}")
        else:
            number = value.number(above=not name.endswith("_seconds"))  # a latency may be 0
            if number and not _LEAST <= number <= _MOST:
                value.refuse(f"must be from {_LEAST:g} to {_MOST:g}")
            values[name] = number
    return kind(**values)
