"""Sums of gradients between ranks of one pipeline that hold the same stage, as bidirectional schedules do. No torch."""

from collections.abc import Sequence

from pipeloom.ir import Placement
from pipeloom.plan.costs.configuration import Configuration
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
    shards = of.replicas if of.strategy.shards_optimizer else 1
    each = NumberBytes.of(of.precision).gradient / shards
    rates = [rate for rate in (network.bytes_per_second, *(link.bytes_per_second for link in network.links)) if rate]
    table = network.latency_seconds
    latency = max(map(max, table)) if isinstance(table, tuple) else table
    most = 0.0
    for held in placement.stages_of:
        shared = [stage for stage in held if len(placement.replicas[stage]) > 1]
        sent = sum(each * parameters[stage] for stage in shared)
        most = max(most, len(shared) * latency + (sent / min(rates) if rates else 0.0))
    return most
