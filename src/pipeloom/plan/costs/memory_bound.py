"""A lower bound of the peak memory of every rank in closed form, to discard configurations early. No torch here.

    always         parameters, masters and optimizer states, as `pipeloom.plan.memory.state_bytes` has them
    activations    of the micro-batches in flight: p - d on rank d of 1f1b and of schedules that keep no fewer, all of
                   them where every forward comes first, the closed form of interleaved; of other schedules, one
    gradients      of the stage with fewest parameters, or where gradients are sharded early, their shard. The first
                   backward makes them while its activations go: with 1f1b and more micro-batches than are in flight,
                   they are there with all activations, else with all but one micro-batch's

Alignment, buffers, gathered parameters and what is recomputed come on top: `CostModel.peak_bytes` has all of it.
"""

from collections.abc import Callable

from pipeloom.ir import Placement
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.memory import OPTIMIZERS
from pipeloom.plan.memory.state_bytes import NumberBytes

_MASTER_BYTES = 4


def _one_forward_one_backward(of: Configuration, rank: int) -> int:
    return min(of.pipeline - rank, of.microbatches)


def _all(of: Configuration, rank: int) -> int:
    return of.microbatches * of.chunks


def _interleaved(of: Configuration, rank: int) -> int:
    depth = (of.chunks - 1) * of.pipeline + 2 * (of.pipeline - 1 - rank) + 1
    return min(depth, of.microbatches * of.chunks)


def _one(of: Configuration, rank: int) -> int:
    return 1


_IN_FLIGHT: dict[str, Callable[[Configuration, int], int]] = {  # micro-batches of one stage
    "1f1b": _one_forward_one_backward,
    "zb-h1": _one_forward_one_backward,
    "zb-h2": _one_forward_one_backward,
    "dapple-pb": _one_forward_one_backward,
    "gpipe": _all,
    "bfs": _all,
    "interleaved": _interleaved,
}


def least_bytes(costs: CostModel, of: Configuration, placement: Placement | None = None) -> list[float]:
    """Bytes of every rank that no run of the configuration takes less than.

    Args:
        costs: of the transformer on its cluster.
        of: the configuration.
        placement: of its schedule; None: stages go round the ranks.
    """
    parameters, kept = costs.parameters(of), costs.kept_bytes(of)
    formats, data = NumberBytes.of(of.precision), of.data_axis()
    shards = of.replicas if data.strategy.shards_optimizer else 1
    each = 0.0 if data.strategy.shards_parameters else float(formats.compute)
    if formats.has_masters or data.strategy.shards_parameters:
        each += 0 if data.strategy.has_server else _MASTER_BYTES / shards
    if not data.strategy.has_server and not of.offload_states:
        each += _MASTER_BYTES * OPTIMIZERS[of.optimizer] / shards
    gradient = formats.gradient / (of.replicas if data.strategy.shards_gradients else 1)
    in_flight = _IN_FLIGHT.get(of.schedule, _one)
    found = []
    for rank in range(of.pipeline):
        held = placement.stages_of[rank] if placement else range(rank, len(parameters), of.pipeline)
        least = min(kept[stage] for stage in held)
        number = 1 if of.offload is not None else in_flight(of, rank)
        if of.slices > 1:  # with scores or masks, a slice keeps less than its part
            number = int(costs.software.fused_attention and not max(costs.model.dropout, costs.software.dropout))
        sums = gradient * min(parameters[stage] for stage in held)
        least /= of.slices
        steady = number < of.microbatches and in_flight is _one_forward_one_backward and of.offload is None
        most = number * least + sums if steady else max(number * least, max(0, number - 1) * least + sums)
        found.append(each * sum(parameters[stage] for stage in held) + most)
    return found
