"""Whether two plans of one run give bitwise the same losses. No torch here.

They do where every sum adds the same numbers in the same order: micro-batches and degrees are equal, and each stage
runs its backwards in micro-batch order. A model that draws random numbers also needs the same schedule, with which a
resumed run restores the generators. Layers may be on other ranks where neither tied weights nor shards of gradients
depend on it.
"""

from pipeloom.ir import Op, Schedule
from pipeloom.ir.data_axis import DataStrategy
from pipeloom.models.experts.settings import ROUTERS
from pipeloom.train.config.schedule import make_schedule
from pipeloom.train.config.train_config import TrainConfig

_EQUAL = (  # options of `parallel`
    *("pipeline", "data", "data_strategy", "data_granularity", "data_bucket_bytes", "slices"),
    *("tensor", "tensor_layout", "tensor_depth", "sequence", "context", "context_kind"),
    *("expert", "expert_axes", "expert_exchange", "order"),
)
_ORDER_FREE = 2  # replicas; with more, a sum depends on how gradients lie in buckets


def same_losses(config: TrainConfig, other: TrainConfig) -> bool:
    """Whether a run with the options `other` goes on with the losses of `config`; both have passed `validate`."""
    if any(getattr(config.parallel, name) != getattr(other.parallel, name) for name in _EQUAL):
        return False
    if config.num_microbatches != other.num_microbatches or config.precision != other.precision:
        return False
    first, second = make_schedule(config), make_schedule(other)
    if first.microbatches_per_update is not None or second.microbatches_per_update is not None:
        return False
    if first == second and config.parallel.cut == other.parallel.cut:
        return True
    if _draws(config) or not (_in_order(first) and _in_order(second)):
        return False
    layers_stay = first.placement == second.placement and config.parallel.cut == other.parallel.cut
    return layers_stay or _layers_may_move(config)


def _draws(config: TrainConfig) -> bool:
    """Whether training draws random numbers."""
    model = config.model
    return bool(model.dropout) or bool(model.experts and ROUTERS[model.router].draws)


def _layers_may_move(config: TrainConfig) -> bool:
    model, replicas = config.model, config.parameter_replicas
    ddp = DataStrategy(config.parallel.data_strategy) is DataStrategy.DDP
    sums = replicas == 1 or (replicas <= _ORDER_FREE and ddp)
    return sums and not model.tie_embeddings and not config.memory.offload_parameters


def _in_order(schedule: Schedule) -> bool:
    """Whether each stage is on one rank, and adds up its gradients by micro-batch."""
    if sum(map(len, schedule.placement.stages_of)) > schedule.num_stages:
        return False
    for order in schedule.orders:
        for ops in ((Op.F,), (Op.B, Op.W)):
            for stage in {action.stage for action in order}:
                numbers = [action.microbatch for action in order if action.op in ops and action.stage == stage]
                if numbers != sorted(numbers):  # type: ignore[type-var]
                    return False
    return True
