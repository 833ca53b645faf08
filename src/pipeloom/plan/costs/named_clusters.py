"""Clusters by name: data-sheet figures, with one calibration per kind of device. No torch here.

    p3.16xlarge   8 V100-SXM2-16GB: NVIDIA V100 data sheet (125 TFLOP/s with tensor cores, 900 GB/s, 6 NVLinks of
                  25 GB/s per direction, 80 multiprocessors). Neighbours have one or two links. The instance has
                  25 Gbit/s of network (aws.amazon.com/ec2/instance-types/p3), by TCP.
    dgx-a100-80   8 A100-SXM4-80GB: NVIDIA A100 data sheet (312 TFLOP/s, 2,039 GB/s, NVSwitch with 300 GB/s per
                  direction, 108 multiprocessors), DGX A100 data sheet (8 network cards of 200 Gbit/s)
    dgx-h100      8 H100-SXM5-80GB: NVIDIA H100 data sheet (989 TFLOP/s dense, 3,350 GB/s, 450 GB/s per direction, 132
                  multiprocessors), DGX H100 data sheet (8 cards of 400 Gbit/s)
    dgx-h200      8 H200-SXM-141GB: NVIDIA H200 data sheet (as H100, with 4,800 GB/s and 141 GB)

Hosts have 2 TB (DGX data sheets) and 488 GiB (p3.16xlarge).

Data sheets have no efficiencies. docs/explanation/predictions.md has them, and the runs that they were chosen with.
"""

from collections.abc import Mapping

from pipeloom.common.json_reader import parse_file
from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork, parse_cluster
from pipeloom.plan.local.saved import LOCAL, local_cluster

_GIB = 2.0**30


def _dgx(name: str, device: Device, nvlink: float, card: float, efficiency: float) -> Cluster:
    """Eight devices and eight cards per node; `nvlink` and `card` in bytes per second and direction."""
    return Cluster(
        name=name,
        devices_per_node=8,
        device=device,
        inside_node=NodeLinks(bytes_per_second=nvlink, pair_bytes_per_second=nvlink, latency_seconds=3e-6),
        between_nodes=NodeNetwork(bytes_per_second=8 * card, latency_seconds=1e-5, cards=8),
        efficiency=efficiency,
        memory_efficiency=0.75,
        link_efficiency=0.75,
        host_memory_bytes=2e12,
    )


def _hopper(name: str, memory: float, capacity: float) -> Device:
    return Device(
        name=name,
        operations_per_second=989e12,
        memory_bytes_per_second=memory,
        launch_seconds=2e-6,
        host_seconds=1.6e-5,
        host_bytes_per_second=55e9,
        memory_bytes=capacity * _GIB,
        multiprocessors=132,
        fp32_operations_per_second=67e12,
    )


_V100 = Device(
    name="V100-SXM2-16GB",
    operations_per_second=125e12,
    memory_bytes_per_second=900e9,
    launch_seconds=5e-6,
    host_seconds=5.5e-5,
    host_bytes_per_second=12e9,
    memory_bytes=16 * _GIB,
    multiprocessors=80,
    fp32_operations_per_second=15.7e12,
    bfloat16=False,
)
_A100 = Device(
    name="A100-SXM4-80GB",
    operations_per_second=312e12,
    memory_bytes_per_second=2.039e12,
    launch_seconds=2e-6,
    host_seconds=1.6e-5,
    host_bytes_per_second=25e9,
    memory_bytes=80 * _GIB,
    multiprocessors=108,
    fp32_operations_per_second=19.5e12,
)

CLUSTERS: Mapping[str, Cluster] = {
    each.name: each
    for each in (
        Cluster(
            name="p3.16xlarge",
            devices_per_node=8,
            device=_V100,
            inside_node=NodeLinks(bytes_per_second=150e9, pair_bytes_per_second=50e9, latency_seconds=3e-6),
            between_nodes=NodeNetwork(bytes_per_second=3.125e9, latency_seconds=5e-5, sum_bytes_per_second=1.9e9),
            efficiency=0.84,
            memory_efficiency=0.8,
            link_efficiency=0.8,
            host_memory_bytes=488 * _GIB,
        ),
        _dgx("dgx-a100-80", _A100, 300e9, 25e9, 0.735),
        _dgx("dgx-h100", _hopper("H100-SXM5-80GB", 3.35e12, 80), 450e9, 50e9, 0.67),
        _dgx("dgx-h200", _hopper("H200-SXM-141GB", 4.8e12, 141), 450e9, 50e9, 0.67),
    )
}
DEVICES = {"v100": "p3.16xlarge", "a100": "dgx-a100-80", "h100": "dgx-h100", "h200": "dgx-h200"}  # and their cluster


def find_cluster(name: str, option: str) -> Cluster:
    """The named cluster, the measured one of this machine (``local``), or the one in the JSON file `name`.

    Args:
        option: that names it, for error messages.

    Raises:
        InputError: neither a known name nor a readable file, or a wrong value in the file.
    """
    if name in CLUSTERS:
        return CLUSTERS[name]
    if name == LOCAL:
        return local_cluster(option)
    if not name.endswith(".json"):
        raise InputError(
            f"{option}={name}: must be {', '.join((*CLUSTERS, LOCAL))}, or a JSON file whose name ends in .json."
        )
    return parse_file(option, name, parse_cluster)
