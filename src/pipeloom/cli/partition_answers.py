"""What `pipeloom partition` answers: the numbers that scripts read, and the lines for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.errors import InputError
from pipeloom.plan.partition import (
    Form,
    Partition,
    Profile,
    data_parallel,
    partition_layers,
    plan_synchronous,
)
from pipeloom.report.drawing import seconds_text
from pipeloom.schedules import find
from pipeloom.schedules.pipedream import full_in_flight
from pipeloom.train.config import TrainConfig
from pipeloom.words import bytes_text, counted

_TIMES = ("compute", "sync", "transfer")
_MOST_SIMULATED = 50_000  # forwards of a step; more take longer than they tell

Answer = tuple[dict[str, Any], list[str]]


def asynchronous(
    profile: Profile,
    levels: Sequence[tuple[int, float]],
    *,
    form: Form,
    memory_cap: float | None,
    state_copies: float,
    run: Mapping[str, Any],
) -> Answer:
    """PipeDream's partition, beside data parallelism alone and one stage a rank; `run`: options of training it."""
    found = partition_layers(profile, levels, form=form, memory_cap=memory_cap, state_copies=state_copies)
    together: Partition | None = data_parallel(profile, levels, form=form, state_copies=state_copies)
    if memory_cap is not None and together is not None and together.memory_bytes > memory_cap:
        together = None
    straight: Partition | None = None
    try:
        straight = partition_layers(
            profile, levels, form=form, memory_cap=memory_cap, state_copies=state_copies, replicate=False
        )
    except InputError as error:
        reason = str(error).split(":")[0]
    full = full_in_flight([stage.replicas for stage in found.stages])
    full_bytes = _full_memory_bytes(profile, found, full)
    answer = {
        "stages": [{"layers": [stage.first, stage.last], "replicas": stage.replicas} for stage in found.stages],
        "period_seconds": found.period_seconds,
        "form": form,
        "bottleneck": {"kind": found.bottleneck.kind, "stage": found.bottleneck.stage},
        "in_flight": full,
        "noam_in_flight": [stage.in_flight for stage in found.stages],
        "memory_bytes": full_bytes,
        "noam_memory_bytes": [stage.memory_bytes for stage in found.stages],
        "replicas_by_level": [list(stage.replicas_by_level) for stage in found.stages],
        "data_parallel_seconds": together and together.period_seconds,
        "straight_pipeline_seconds": straight and straight.period_seconds,
    }
    ranks = sum(stage.replicas for stage in found.stages)
    lines = [
        f"{seconds_text(found.period_seconds)} a minibatch, {counted(len(found.stages), 'stage')} on "
        f"{counted(ranks, 'rank')}; {_why(found, form)}",
        *_stages(profile, found),
        _beside("data parallelism alone", together, found, form) or "data parallelism alone holds more than the cap",
        _beside("one stage a rank", straight, found, form) or f"one stage a rank is not possible ({reason})",
    ]
    if found.fewer_ranks is not None:
        count, seconds = found.fewer_ranks
        lines.append(
            f"{counted(count, 'rank')} alone would take {seconds_text(seconds)}: more cost more than they give"
        )
    return answer, [*lines, *_in_flight(found, full, max(full_bytes), memory_cap), _train(profile, found, full, run)]


def synchronous(profile: Profile, ranks: int, bandwidth: float, *, num_microbatches: int, published: bool) -> Answer:
    """DAPPLE's plan, and what the simulator says of it under DAPPLE's two policies."""
    plan = plan_synchronous(
        profile, ranks=ranks, bandwidth=bandwidth, num_microbatches=num_microbatches, published=published
    )
    simulated = {}
    if num_microbatches * len(plan.stages) <= _MOST_SIMULATED:
        simulated = {name: plan.simulate(find(name)) for name in ("1f1b", "dapple-pb")}
    answer = {
        "stages": [{"layers": [first, last], "replicas": replicas} for first, last, replicas in plan.stages],
        "step_seconds": plan.step_seconds,
        "simulated_seconds": simulated,
    }
    rows: list[tuple[str, ...]] = [("stage", "layers", "", "replicas", "forward", "backward", "transfer", "sync")]
    times = (plan.forward_seconds, plan.backward_seconds, (*plan.transfer_seconds, 0.0), plan.reduce_seconds)
    for number, ((first, last, replicas), *seconds) in enumerate(zip(plan.stages, *times, strict=True)):
        rows.append((*_cells(profile, number, first, last), str(replicas), *map(_seconds, seconds)))
    said = ", ".join(f"{seconds_text(seconds)} with {name}" for name, seconds in simulated.items())
    return answer, [
        f"{seconds_text(plan.step_seconds)} a step of {counted(num_microbatches, 'micro-batch')}, "
        f"{counted(len(plan.stages), 'stage')} on {counted(ranks, 'rank')}",
        *_table(rows),
        *([f"simulated: {said}"] if said else []),
    ]


def _stages(profile: Profile, found: Partition) -> list[str]:
    rows: list[tuple[str, ...]] = [("stage", "layers", "", "replicas", *_TIMES, "in flight", "memory")]
    for number, stage in enumerate(found.stages):
        times = (stage.compute_seconds, stage.sync_seconds, stage.transfer_seconds)
        rows.append(
            (
                *_cells(profile, number, stage.first, stage.last),
                " x ".join(map(str, stage.replicas_by_level)),
                *map(_seconds, times),
                str(stage.in_flight),
                bytes_text(stage.memory_bytes),
            )
        )
    return _table(rows)


def _full_memory_bytes(profile: Profile, found: Partition, full: Sequence[int]) -> list[float]:
    """Of a rank of each stage, with so many minibatches in flight: each more has its weights and outputs."""
    return [
        stage.memory_bytes
        + (count - stage.in_flight)
        * sum(layer.parameter_bytes + layer.activation_bytes for layer in profile.layers[stage.first : stage.last + 1])
        for stage, count in zip(found.stages, full, strict=True)
    ]


def _in_flight(found: Partition, full: Sequence[int], full_bytes: float, memory_cap: float | None) -> list[str]:
    """That the schedule's own number in flight may be too few; nothing where it is not."""
    noam = [stage.in_flight for stage in found.stages]
    if list(full) == noam:
        return []
    said, other = (", ".join(map(str, numbers)) for numbers in (noam, full))
    over = ", more than the cap" if memory_cap is not None and full_bytes > memory_cap else ""
    return [
        f"with NOAM in flight ({said}) the period may not be reached; take --in-flight full ({other}): "
        f"{bytes_text(full_bytes)} on the fullest rank{over}"
    ]


def _train(profile: Profile, found: Partition, full: Sequence[int], run: Mapping[str, Any]) -> str:
    """The command that trains so; where the layers are those of pipeloom's GPT, cut as found."""
    replicas = [stage.replicas for stage in found.stages]
    options: dict[str, Any] = {
        "schedule": "pipedream",
        "parallel.pipeline": len(replicas),
        "parallel.replicas": ",".join(map(str, replicas)),
    }
    names = [layer.name for layer in profile.layers]
    if names == ["embedding", *(f"blocks.{k}" for k in range(len(names) - 3)), "norm", "head"]:
        counts = [sum(n.startswith("blocks.") for n in names[s.first : s.last + 1]) for s in found.stages]
        if not all(counts):
            return f"stage {counts.index(0)} has no block: pipeloom train cannot cut so, pipeloom.Stream can"
        options |= {"parallel.cut": ",".join(map(str, counts)), "model.layers": sum(counts)}
    if list(full) != [stage.in_flight for stage in found.stages]:
        options["parallel.in_flight"] = "full"
    default, each = TrainConfig(), math.lcm(*replicas)
    for key in ("steps", "eval_steps", "save_steps"):  # the stream drains there, when all stages have updated
        if getattr(default, key) % each:
            options[key] = -(-getattr(default, key) // each) * each
    return " ".join(["train it: pipeloom train", *(f"--{key} {value}" for key, value in {**options, **run}.items())])


def _cells(profile: Profile, number: int, first: int, last: int) -> tuple[str, str, str]:
    names = dict.fromkeys(_printable(profile.layers[layer].name) for layer in (first, last))
    return str(number), f"{first}-{last}", " .. ".join(names)


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"


def _printable(name: str) -> str:
    """`name` on one line, with nothing in it that a terminal obeys."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def _beside(name: str, other: Partition | None, found: Partition, form: Form) -> str | None:
    """A line on another partition; None where there is none."""
    if other is None:
        return None
    ratio = other.period_seconds / found.period_seconds if found.period_seconds else 1.0
    return f"{name} takes {seconds_text(other.period_seconds)}, {ratio:.2f} x as long; {_why(other, form)}"


def _why(found: Partition, form: Form) -> str:
    """What the period is as long as, in words."""
    number = found.bottleneck.stage
    stage = found.stages[number]
    if found.bottleneck.kind == "transfer":
        return f"bottleneck: transfer from stage {number} to {number + 1}"
    kinds = {"compute": stage.compute_seconds, "sync": stage.sync_seconds}
    longer = found.bottleneck.kind
    [other] = kinds.keys() - {longer}
    beside = f" ({'with' if form == 'summed' else 'beside'} {other} {seconds_text(kinds[other])})"
    return f"bottleneck: {longer} of stage {number}, {seconds_text(kinds[longer])}{beside if kinds[other] else ''}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in (1, 2) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
