"""Options of asynchronous schedules, and of synchronous ones that they are not for."""

import math

from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.train.config.rules.unused import word_of
from pipeloom.train.config.schedule import schedule_name
from pipeloom.train.config.train_config import TrainConfig

DRAINS = ("steps", "eval_steps", "save_steps")  # a stream drains there, so all stages must have updated
STALENESS = ("none", "inverse", "pipemare")


def staleness(config: TrainConfig) -> tuple[str, int | None]:
    """``optimizer.staleness`` as a kind of discount and, for pipemare, its number of steps.

    Raises:
        InputError: it is malformed.
    """
    kind, _, steps = config.optimizer.staleness.partition(":")
    counted = steps.isdecimal() and int(steps) > 0
    if kind not in STALENESS or (kind == "pipemare") is not counted or (steps and not counted):
        raise InputError(
            f"optimizer.staleness={config.optimizer.staleness}: must be none, inverse, or pipemare:K with a number of "
            "steps."
        )
    return kind, int(steps) if counted else None


def check_stream_options(config: TrainConfig, schedule: Schedule) -> None:
    """Validate options of asynchronous schedules, and that a stream can drain at the steps that need it."""
    kind, _ = staleness(config)
    if schedule.microbatches_per_update is not None:
        check_stream(config)
        return
    has_no_effect = f"has no effect with schedule {schedule.name!r}"
    if config.parallel.in_flight != "noam":
        raise InputError(
            f"parallel.in_flight={config.parallel.in_flight}: {has_no_effect}, which is synchronous. Remove it, or use "
            "pipedream."
        )
    if kind != "none" or config.optimizer.replica_scaling:
        name = "staleness" if kind != "none" else "replica_scaling"
        value = word_of(getattr(config.optimizer, name))
        raise InputError(
            f"optimizer.{name}={value}: {has_no_effect}: a synchronous schedule has no stale gradients, and "
            "updates all stages together. Remove it, or use pipedream."
        )


def check_stream(config: TrainConfig) -> None:
    """Validate options that no asynchronous schedule supports, before one is made.

    Raises:
        InputError: the first option.
    """
    name = schedule_name(config)
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier=false: has no effect with schedule {name!r}, which has no barrier. Remove it."
        )
    if config.model.tie_embeddings and config.parallel.pipeline > 1:
        raise InputError(
            f"model.tie_embeddings=true: does not work with schedule {name!r}, whose first and last stage update at "
            "different times. Remove it, or use a synchronous schedule such as 1f1b."
        )
    each = steps_between_drains(config)
    for key in DRAINS:
        if getattr(config, key) % each:
            raise InputError(
                f"{key}={getattr(config, key)}: must be a multiple of {each}: with parallel.replicas="
                f"{config.parallel.replicas} a stream can drain every {each} steps."
            )


def steps_between_drains(config: TrainConfig) -> int:
    """The steps after which every stage has updated, of a run whose schedule is not made yet."""
    return math.lcm(config.num_microbatches, *config.replicas) // config.num_microbatches
