"""Copies of the pipeline in `pipeloom train`: how many, which samples each takes, what is refused. No torch here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pipeloom.errors import DataError, InputError
from pipeloom.ir import Schedule
from pipeloom.split.layer_chain import even_parts
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig


def settled(config: TrainConfig, world_size: int | None) -> TrainConfig:
    """`config` with a number in the place of ``parallel.data`` -1.

    Args:
        config: what was asked for.
        world_size: processes that the environment says there are; None where this process is alone.

    Raises:
        InputError: the processes are no multiple of the pipeline's ranks, or nobody says how many there are.
    """
    if config.parallel.data != -1:
        return config
    if world_size is None:
        raise InputError(
            "parallel.data is -1 without torchrun: it is what is left of the processes, and here their number follows "
            "from it; give a number"
        )
    config = replace(config, parallel=replace(config.parallel, data=config.mesh_shape(world_size).degree("dp")))
    default = ParallelConfig()  # what was for more copies than there are
    idle: dict[str, Any] = {name: getattr(default, name) for name in idle_options(config)}
    return replace(config, parallel=replace(config.parallel, **idle))


def idle_options(config: TrainConfig) -> list[str]:
    """The options of ``parallel`` that mean nothing for as many copies as `config` has.

    Of one copy whose parameters are in memory they are the model's own, whatever the strategy. Where they are offloaded
    zero3 gathers and frees them, bucket by bucket, and masters of 16-bit formats come in buckets.
    """
    if config.parallel.data != 1:
        return []
    away = config.memory.offload_parameters
    idle = [] if away and config.parallel.data_strategy == "zero3" else ["data_strategy", "data_granularity"]
    return [*idle, *([] if away else ["data_bucket_bytes"]), "order"]


def process_names(config: TrainConfig) -> list[str]:
    """What each process of a run is called."""
    shape = config.mesh_shape()
    if config.num_copies == 1:
        return [f"rank {process}" for process in range(shape.num_processes)]
    places = map(shape.coordinates, range(shape.num_processes))
    return [f"rank {place['pp']} of copy {place['dp']}" for place in places]


def share(count: int, copy: int, num_copies: int) -> range:
    """Which of `count` samples a copy takes: pieces one behind the other, the first ones longer by one at most.

    So the samples of all copies are those of one, whatever their number.
    """
    parts = even_parts(count, num_copies)
    start = sum(parts[:copy])
    return range(start, start + parts[copy])


def check_processes(config: TrainConfig, world_size: int | None) -> None:
    """Refuse another number of processes than ranks of all copies.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    if config.local and world_size not in (None, 1):
        raise InputError(f"--local in a group of {world_size} processes: it is one process; start it without torchrun")
    ranks, copies = config.num_ranks, config.num_copies
    if config.local or world_size in (None, ranks * copies):
        return
    if copies > 1:
        raise InputError(
            f"{world_size} processes for {copies} copies of a pipeline of {ranks} ranks: each rank of each copy is one "
            f"process; start {ranks * copies} of them, or give --parallel.data -1 for as many copies as there can be"
        )
    raise InputError(
        f"{world_size} processes for a pipeline of {ranks} ranks: each rank is one process; start {ranks} of them, or "
        f"give --parallel.pipeline {world_size}, or --parallel.data -1 for copies of the pipeline"
    )


def check_copies(config: TrainConfig, schedule: Schedule) -> None:
    """Refuse what several copies, formats other than float32, or parameters in a file cannot be combined with.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    copies = config.num_copies
    config.data_parallel  # noqa: B018  # a granularity that the strategy does not have
    config.number_format  # noqa: B018  # gradients that the format does not have
    config.mesh_shape(config.num_ranks * copies if config.parallel.data == -1 else None)
    unusual = f"precision.dtype {config.precision.dtype}"
    if config.shared is not None:
        unusual = f"parallel.data {copies}" if copies > 1 else "memory.offload_parameters"
    if copies > 1 and config.local:
        raise InputError(f"--local with {unusual}: each rank of each copy is a process of its own; drop one")
    scale = config.precision.loss_scale
    if not (math.isfinite(scale) and scale >= 1):
        raise InputError(f"precision.loss_scale is {scale}: it is a finite factor from 1; correct it")
    if config.shared is None and config.precision.dtype == "fp32":
        return
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"schedule {schedule.name!r} with {unusual}: its stages update by themselves, one copy in float32 "
            "and in memory; take a schedule that flushes, such as 1f1b, or parallel.replicas for more processes"
        )
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier false with {unusual}: updates that are validated later are those of one copy in "
            "float32 and in memory; drop one"
        )


def check_batch(config: TrainConfig) -> None:
    """Raises InputError where a copy has less than one sample for each micro-batch."""
    size, copies = config.batch.size, config.num_copies
    if size // copies < config.num_microbatches:
        of_copies = f" of each of {copies} copies" if copies > 1 else ""
        raise InputError(
            f"batch.size is {size} for {config.num_microbatches} micro-batches{of_copies}: each needs a sample; "
            "raise batch.size or lower batch.microbatches"
        )


def check_validation(config: TrainConfig, found: int) -> None:
    """Raises DataError where `found` samples are too few for an evaluation."""
    copies = config.num_copies
    if found // copies < config.num_microbatches:
        of_copies = f" of each of {copies} copies" if copies > 1 else ""
        raise DataError(
            f"the validation data has {found} samples of {config.model.sequence_length} tokens for "
            f"{config.num_microbatches} micro-batches{of_copies}: each needs a sample; raise "
            "data.validation_fraction, add text, or give --eval_steps 0"
        )
