"""The data-parallel degree of a run: its value, the names of its processes, the samples of each replica. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeloom.errors import InputError
from pipeloom.ir import DataStrategy
from pipeloom.split.layer_chain import even_parts
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig


def resolve_data_degree(config: TrainConfig, world_size: int | None) -> TrainConfig:
    """`config` with a number in place of ``parallel.data`` -1.

    Args:
        config: as given.
        world_size: processes of the process group; None outside of one.

    Raises:
        InputError: there is no process group, or its size is not a multiple of the pipeline-parallel degree.
    """
    if config.parallel.data != -1:
        return config
    if world_size is None:
        raise InputError("parallel.data=-1: needs a running process group. Outside torchrun, give a number.")
    config = replace(config, parallel=replace(config.parallel, data=config.mesh_shape(world_size).degree("dp")))
    default = ParallelConfig()  # options for more replicas than there are
    unused: dict[str, Any] = {name: getattr(default, name) for name in unused_data_options(config)}
    return replace(config, parallel=replace(config.parallel, **unused))


def unused_data_options(config: TrainConfig) -> list[str]:
    """The options of ``parallel`` that have no effect with the data-parallel degree of `config`.

    With one replica and parameters in memory, nothing is sharded or communicated. Offloaded parameters of zero3 are
    gathered and freed in buckets, and so are float32 masters of 16-bit formats, also with one replica.
    """
    if config.parallel.data != 1:
        return []
    offloads = config.memory.offload_parameters
    gathers = offloads and DataStrategy(config.parallel.data_strategy).shards_parameters
    unused = [] if gathers else ["data_strategy", "data_granularity"]
    return [*unused, *([] if offloads else ["data_bucket_bytes"]), "order"]


def process_names(config: TrainConfig) -> list[str]:
    """The name of each process in messages."""
    shape = config.mesh_shape()
    if config.data_degree == 1:
        return [f"rank {process}" for process in range(shape.num_processes)]
    places = map(shape.coordinates, range(shape.num_processes))
    return [f"rank {place['pp']} of replica {place['dp']}" for place in places]


def samples_of_replica(count: int, replica: int, degree: int) -> range:
    """Which of the `count` samples of a batch a replica takes: contiguous, sizes differ by at most one.

    The samples of all replicas together do not depend on their number.
    """
    parts = even_parts(count, degree)
    start = sum(parts[:replica])
    return range(start, start + parts[replica])
