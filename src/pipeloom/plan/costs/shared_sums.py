"""Sums of gradients between ranks of one pipeline that hold the same stage, as bidirectional schedules do. No torch."""

from collections.abc import Sequence

from pipeloom.ir import Placement
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.measured_links import exchange_seconds
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.sim import Network


def shared_sum_seconds(of: Configuration, placement: Placement, parameters: Sequence[float], network: Network) -> float:
    """Seconds at the end of a step, of the rank that sends most.

    The holders of a stage exchange their gradients over the links between stages, after those of the data axis. Where
    replicas shard the optimizer, each exchanges its shard.

    Args:
        of: the configuration.
        placement: which ranks hold which stage.
        parameters: elements of every stage on one process.
        network: the links between stages.
    """
    return max(exchanged_seconds(sent, network) for sent in _sent(of, placement, parameters))


def exchanged_seconds(sent: Sequence[float], network: Network) -> float:
    """Seconds in which two ranks exchange messages of these bytes over the slowest of the links between stages."""
    latency, rate = network.slowest
    return len(sent) * latency + sum(sent) / rate


def measured_sum_seconds(
    of: Configuration, placement: Placement, parameters: Sequence[float], cluster: Cluster
) -> float:
    """The same on a measured machine, whose processes copy the gradients, add them up, and take turns on its cores."""
    assert cluster.measured is not None
    most = max(_sent(of, placement, parameters), key=sum)
    exchanges = sum(exchange_seconds(cluster, size) for size in most)
    sums = KernelTimes(cluster, of.element).elementwise(3 * sum(most), 1)
    return max(1.0, of.devices / cluster.measured.cores) * (exchanges + sums)


def _sent(of: Configuration, placement: Placement, parameters: Sequence[float]) -> list[list[float]]:
    """Of every rank, the bytes of the gradients of each stage that it shares with other ranks."""
    shards = of.replicas if of.strategy.shards_optimizer else 1
    each = NumberBytes.of(of.precision).gradient / shards
    return [
        [each * parameters[stage] for stage in held if len(placement.replicas[stage]) > 1]
        for held in placement.stages_of
    ]
