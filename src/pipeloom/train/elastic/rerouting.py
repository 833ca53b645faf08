"""The layout in which data-parallel peers compute the micro-batches of lost ranks, as in ReCycle (SOSP 2024). No torch.

    pipeline 2 x data 2, 4 micro-batches each       rank 1 of replica 0 is lost       one pipeline, 8 micro-batches

    replica 0   rank 0 ── rank 1                    rank 0 ── ✗                       stage 0 on 2 ranks ──╮
    replica 1   rank 0 ── rank 1                    rank 0 ── rank 1                                       ├── stage 1
                                                                                                         ──╯   on 1

The surviving ranks form one pipeline in which each stage is on as many ranks as have survived: ``parallel.replicas``.
Stages, the global batch and its micro-batches stay. The gradients of a stage are summed over its ranks.
"""

from collections.abc import Collection
from dataclasses import replace

from pipeloom.errors import PipeloomError
from pipeloom.ir import Placement
from pipeloom.train.config.schedule import (
    make_schedule,
    replicates,
    schedule_name,
    stages_of_ranks,
    unused_data_options,
)
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.layouts import Layout, check_layout, with_stages

_SCHEDULE = "1f1b"


def survivors(config: TrainConfig, lost: Collection[int]) -> list[tuple[int, int]]:
    """The stage and the number of each rank that was not lost, in their order in `rerouted`."""
    stages, shape = stages_of_ranks(config), config.mesh_shape()
    return sorted(
        (stages[shape.coordinates(rank)["pp"]], rank) for rank in range(config.num_processes) if rank not in lost
    )


def keeps_stages(config: TrainConfig) -> bool:
    """Whether each rank holds one stage, the same as in `rerouted`, so that it can go on with its own state."""
    return config.parallel.cut != "time" and make_schedule(config).placement == Placement.replicated(config.replicas)


def rerouted(config: TrainConfig, lost: Collection[int]) -> Layout | None:
    """The layout without the lost ranks, whose micro-batches their peers compute.

    Args:
        config: of the ranks that ran.
        lost: those of them that were lost.

    Returns:
        None without ``reroute``, where a stage has no rank left, or with fewer than ``min_ranks``.
    """
    if not config.reroute:
        return None
    left = [stage for stage, _ in survivors(config, lost)]
    counts = [left.count(stage) for stage in range(config.parallel.pipeline)]
    if not all(counts) or sum(counts) < config.min_ranks:
        return None
    replicas = ",".join(map(str, counts)) if max(counts) > 1 else None
    found = config.changed("parallel", data=1, chunks=None, replicas=replicas)
    found = found.changed("batch", microbatches=config.num_microbatches * config.data_degree)
    usual = ParallelConfig()
    found = found.changed("parallel", **{name: getattr(usual, name) for name in unused_data_options(found)})
    found, notes = with_stages(replace(found, reroute=found.has_peers), len(config.parallel.cut.split(",")))
    if not replicates(name := schedule_name(config)):
        found, notes = replace(found, schedule=_SCHEDULE), [*notes, f"schedule={_SCHEDULE} in place of {name}"]
    try:
        check_layout(found)
    except PipeloomError:
        return None
    return Layout(found, tuple(notes))
