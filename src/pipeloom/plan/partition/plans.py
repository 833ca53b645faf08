"""Partitions as plans for `pipeloom train` and `pipeloom.Pipeline`."""

import re
from collections.abc import Sequence
from itertools import chain
from typing import Literal

from pipeloom.errors import InputError
from pipeloom.plan.partition.dapple import SynchronousPartition
from pipeloom.plan.partition.pipedream import Partition, noam_period
from pipeloom.plan.partition.profile import Profile
from pipeloom.plan.plan import Plan

_BLOCK = re.compile(r".+\.\d+")  # a member of a list of modules, such as blocks.3


def stream_plan(
    profile: Profile,
    found: Partition,
    *,
    in_flight: Literal["noam", "full"],
    batch_size: int | None = None,
    why: Sequence[str] = (),
) -> Plan:
    """PipeDream's partition as a plan for schedule `pipedream`.

    Args:
        profile: the partitioned profile.
        found: its partition.
        in_flight: in-flight minibatches: "noam", or "full" for the period of the slowest stage.
        batch_size: samples per minibatch, if known.
        why: reasons, one sentence each.

    Raises:
        InputError: several stages share weights, or stages are no consecutive layers of the model.
    """
    _check_order(found.order)
    spans, full = [(stage.first, stage.last) for stage in found.stages], in_flight == "full"
    if shared := shared_weights(profile, spans):
        stages = " and ".join(map(str, shared[0][1]))
        raise InputError(
            f"stages {stages} share weights, but the stages of a stream update at different times. Untie the weights."
        )
    memory = ((stage.full_memory_bytes if full else stage.memory_bytes,) * stage.replicas for stage in found.stages)
    return Plan(
        schedule="pipedream",
        pipeline=len(found.stages),
        microbatches=1,
        replicas=tuple(stage.replicas for stage in found.stages),
        in_flight=in_flight,
        cut=layers_per_stage(profile, spans),
        batch_size=batch_size,
        predicted_step_seconds=found.period_seconds if full else noam_period(found),
        predicted_memory_bytes=tuple(chain(*memory)),
        why=tuple(why),
    )


def synchronous_plan(
    profile: Profile,
    found: SynchronousPartition,
    *,
    schedule: str,
    seconds: float,
    batch_size: int | None = None,
    why: Sequence[str] = (),
) -> Plan:
    """DAPPLE's partition as a plan, if all stages have the same number of replicas: the data-parallel degree.

    Args:
        profile: the partitioned profile.
        found: its partition.
        schedule: name of the schedule, such as "1f1b".
        seconds: predicted seconds per step.
        batch_size: samples per micro-batch over all replicas, if known.
        why: reasons, one sentence each.

    Raises:
        InputError: stages have different numbers of replicas, or are no consecutive layers of the model.
    """
    _check_order(found.order)
    replicas = [count for _, _, count in found.stages]
    if len(set(replicas)) > 1:
        raise InputError(
            f"replicas={','.join(map(str, replicas))}: a synchronous schedule runs the same number of replicas of each "
            "stage. Use --schedule pipedream, or another number of ranks."
        )
    return Plan(
        schedule=schedule,
        pipeline=len(found.stages),
        microbatches=found.num_microbatches,
        data=replicas[0],
        cut=layers_per_stage(profile, [(first, last) for first, last, _ in found.stages]),
        batch_size=None if batch_size is None else batch_size * found.num_microbatches,
        predicted_step_seconds=seconds,
        why=tuple(why),
    )


def _check_order(order: Sequence[int]) -> None:
    if list(order) != sorted(order):
        raise InputError(
            "a stage has layers that do not follow each other in the model, and pipeloom cuts models into consecutive "
            "layers. Remove `edges` from the profile to plan such cuts."
        )


def layers_per_stage(profile: Profile, stages: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The cut of stages (first layer, last layer), as `pipeloom.split.split` takes it.

    For a model with a list of blocks, such as ``blocks.0`` and ``blocks.1``, only blocks count.
    """
    counted = counted_layers(profile)
    return tuple(sum(counted[first : last + 1]) for first, last in stages)


def counted_layers(profile: Profile) -> list[bool]:
    """Whether a cut counts each layer."""
    blocks = [bool(_BLOCK.fullmatch(layer.name)) for layer in profile.layers]
    return blocks if any(blocks) else [True] * len(blocks)


def shared_weights(profile: Profile, stages: Sequence[tuple[int, int]]) -> list[tuple[float, list[int]]]:
    """Weights that several stages (first layer, last layer) hold: bytes, and the stages."""
    found = []
    for size, layers in profile.ties:
        homes = [k for k, (first, last) in enumerate(stages) if any(first <= layer <= last for layer in layers)]
        if len(homes) > 1:
            found.append((size, homes))
    return found
