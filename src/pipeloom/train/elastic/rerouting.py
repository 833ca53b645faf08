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
from pipeloom.train.config.schedule import replicates, schedule_name, stages_of_ranks, unused_data_options
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic.layouts import Layout, check_layout, with_stages

_SCHEDULE = "1f1b"


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
    counts, stages = [count * config.data_degree for count in config.replicas], stages_of_ranks(config)
    shape = config.mesh_shape()
    for rank in lost:
        counts[stages[shape.coordinates(rank)["pp"]]] -= 1
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
