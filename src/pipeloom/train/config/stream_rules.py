"""Schedules that update while they run (pipedream, pipedream-2bw), in `pipeloom train`. No torch here."""

from __future__ import annotations

import math
from pathlib import Path

from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.ir.versions import check_drained
from pipeloom.schedules import FAMILIES, steady_length
from pipeloom.train.checkpoint.manifest import read_manifest
from pipeloom.train.config.train_config import TrainConfig

_MOST_STEPS = 10_000  # between drains
DRAINS = ("steps", "eval_steps", "save_steps")  # the stream drains there, so all stages have to have updated
STALENESS = ("none", "inverse", "pipemare")


def is_stream(name: str) -> bool:
    """Whether a schedule of the table updates while it runs; files flush."""
    family = FAMILIES.get(name)
    return family is not None and bool(family.stream)


def stream_length(config: TrainConfig) -> int:
    """Micro-batches of a stream that is long enough to show its steady state, from which any length follows."""
    each, in_flight = config.num_microbatches, config.parallel.in_flight
    return steady_length(config.replicas, microbatches_per_update=each, in_flight=in_flight)


def staleness(config: TrainConfig) -> tuple[str, int | None]:
    """``optimizer.staleness`` as a kind of discount and, for pipemare, its number of steps.

    Raises:
        InputError: it is neither.
    """
    kind, _, steps = config.optimizer.staleness.partition(":")
    counted = steps.isdecimal() and int(steps) > 0
    if kind not in STALENESS or (kind == "pipemare") is not counted or (steps and not counted):
        raise InputError(
            f"optimizer.staleness is {config.optimizer.staleness!r}: it is none, inverse, or pipemare:K with a number "
            "of steps; choose one"
        )
    return kind, int(steps) if counted else None


def check_replicas(config: TrainConfig) -> None:
    """Refuse replicas that take turns for so long that no run drains, before a schedule is made of them.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    each = math.lcm(*config.replicas)
    if each > _MOST_STEPS:
        raise InputError(
            f"parallel.replicas is {config.parallel.replicas}: all stages have updated after every {each} steps, their "
            f"least common multiple, and {_MOST_STEPS} are the most; take fewer, or numbers that divide each other"
        )


def check_stream(config: TrainConfig, schedule: Schedule) -> None:
    """Refuse options of streams for a schedule that is none, and steps at which a stream cannot drain.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    kind, _ = staleness(config)
    if schedule.microbatches_per_update is None:
        if config.parallel.in_flight != "noam":
            raise InputError(
                f"parallel.in_flight {config.parallel.in_flight} with schedule {schedule.name!r}, which flushes: "
                "leave it out, or use pipedream"
            )
        if kind != "none" or config.optimizer.replica_scaling:
            what = "staleness" if kind != "none" else "replica_scaling"
            raise InputError(
                f"optimizer.{what} with schedule {schedule.name!r}, which flushes: its gradients are not late, and no "
                "stage has more replicas than others; leave it out, or use pipedream"
            )
        return
    check_streamed(config)


def check_streamed(config: TrainConfig) -> None:
    """What `check_stream` refuses of a stream; no schedule has to be made for it.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    name = config.schedule
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier false with schedule {name!r}: a stream has no barrier to leave out; drop it"
        )
    if config.model.tie_embeddings and config.parallel.pipeline > 1:
        raise InputError(
            f"model.tie_embeddings with schedule {name!r}: the first and the last stage hold the same "
            "parameters and update at different times; leave it out, or take a schedule that flushes, such as 1f1b"
        )
    each = steps_between_drains(config)
    for key in DRAINS:
        if getattr(config, key) % each:
            raise InputError(
                f"{key} is {getattr(config, key)} with replicas {config.parallel.replicas}: the stream drains there, "
                f"and all stages have updated after every {each} steps; take a multiple of {each}"
            )


def steps_between_drains(config: TrainConfig) -> int:
    """`pipeloom.ir.versions.batches_between_drains` of a run whose schedule is not made yet."""
    return math.lcm(config.num_microbatches, *config.replicas) // config.num_microbatches


def check_resumed_stream(config: TrainConfig, schedule: Schedule, checkpoint: Path) -> None:
    """Refuse to go on from a step at which the stream could not have drained.

    Raises:
        InputError: what was seen, the rule, the fix; in one line.
    """
    if schedule.microbatches_per_update is None:
        return
    step = read_manifest(checkpoint).step
    check_drained(schedule, step, f"{checkpoint} is after step {step}")
