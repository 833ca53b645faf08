"""Times of a run of pipeloom's GPT on a cluster, from its configuration. No torch."""

from pipeloom.ir.data_axis import DataStrategy, Granularity
from pipeloom.ir.recompute import Recompute, recompute_of_stages
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.sim import CostsFile
from pipeloom.train.config.inside_stage import inside_stage
from pipeloom.train.config.memory import data_axis, planned_model, planned_program
from pipeloom.train.config.schedule import make_schedule
from pipeloom.train.config.train_config import TrainConfig


def cluster_costs(config: TrainConfig, vocabulary_size: int, cluster: Cluster) -> CostsFile:
    """Times of stages without recomputation, and links.

    Raises:
        InputError: sizes that cannot be shared, or a cut by measured times.
    """
    of, costs = (
        configuration_of(config, vocabulary_size)._replace(recompute=Recompute.NONE),
        _costs(config, vocabulary_size, cluster),
    )
    return CostsFile(costs=costs.costs(of), network=costs.network(of), memory_caps=None)


def cluster_step_seconds(config: TrainConfig, vocabulary_size: int, cluster: Cluster) -> float:
    """Predicted seconds of a step. Raises InputError as `cluster_costs`."""
    program = planned_program(config, make_schedule(config))
    of = configuration_of(config, vocabulary_size)
    return _costs(config, vocabulary_size, cluster).predict(of, program).step_seconds


def _costs(config: TrainConfig, vocabulary_size: int, cluster: Cluster) -> CostModel:
    return CostModel(model=Architecture.of_gpt(config.gpt(vocabulary_size)), cluster=cluster)


def configuration_of(config: TrainConfig, vocabulary_size: int) -> Configuration:
    """All that a step's costs depend on, without offload. Raises InputError as `cluster_costs`."""
    schedule, axis = make_schedule(config), data_axis(config)
    stages = planned_model(config, vocabulary_size, schedule.num_stages).stages
    return Configuration(
        schedule=schedule.name,
        pipeline=schedule.num_ranks,
        microbatches=config.num_microbatches,
        microbatch_size=config.microbatch_size,
        slices=schedule.num_slices,
        data=config.data_degree,
        strategy=axis.strategy if axis else DataStrategy.DDP,
        granularity=axis.granularity if axis else Granularity.STEP,
        inside=inside_stage(config),
        recompute=tuple(recompute_of_stages(config.memory.recompute, schedule.num_stages)) or Recompute.NONE,
        precision=config.number_format,
        optimizer=config.optimizer.name,
        blocks=tuple(sum(layer.is_block for layer in stage) for stage in stages),
        order=config.mesh_shape(config.num_processes).axes,
    )
