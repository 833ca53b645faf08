"""What `pipeloom partition` answers: the numbers that scripts read, and the lines for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.common.quantities import bytes_text, counted, seconds_text
from pipeloom.errors import InputError
from pipeloom.plan.partition import (
    Form,
    Partition,
    Profile,
    data_parallel,
    noam_period,
    partition_layers,
    plan_synchronous,
)
from pipeloom.schedules import find, steady_length
from pipeloom.train.config.stream_command import stream_command

_TIMES = ("compute", "sync", "transfer")
_MOST_SIMULATED = 50_000  # forwards of a step; more take longer than they tell
_NEARLY = 1.001  # a period so much longer is as good as the same

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
    noam_seconds = noam_period(found)
    fewer = found.fewer_ranks
    answer: dict[str, Any] = {
        "stages": [{"layers": [stage.first, stage.last], "replicas": stage.replicas} for stage in found.stages],
        "period_seconds": found.period_seconds,
        "form": form,
        "bottleneck": {"kind": found.bottleneck.kind, "stage": found.bottleneck.stage},
        "in_flight": [stage.in_flight for stage in found.stages],
        "memory_bytes": [stage.memory_bytes for stage in found.stages],
        "noam_period_seconds": noam_seconds,
        "full_in_flight": [stage.full_in_flight for stage in found.stages],
        "full_memory_bytes": [stage.full_memory_bytes for stage in found.stages],
        "replicas_by_level": [list(stage.replicas_by_level) for stage in found.stages],
        "data_parallel_seconds": together and together.period_seconds,
        "straight_pipeline_seconds": straight and straight.period_seconds,
        "fewer_ranks": fewer and {"ranks": fewer[0], "period_seconds": fewer[1]},
        "ties": _ties(profile, [(stage.first, stage.last) for stage in found.stages]),
    }
    ranks = sum(stage.replicas for stage in found.stages)
    lines = [
        f"{seconds_text(found.period_seconds)} a minibatch, {counted(len(found.stages), 'stage')} on "
        f"{counted(ranks, 'rank')}; {_why(found, form)}",
        *_stages(profile, found),
        _beside("data parallelism alone", together, found, form) or "data parallelism alone holds more than the cap",
        _beside("one stage a rank", straight, found, form) or f"one stage a rank is not possible ({reason})",
    ]
    if fewer is not None:
        lines.append(
            f"{counted(fewer[0], 'rank')} alone would take {seconds_text(fewer[1])}: more cost more than they give"
        )
    full, said = _in_flight(found, noam_seconds, memory_cap)
    return answer, [*lines, *_shared(answer["ties"]), *said, *_train(profile, found, full, run)]


def synchronous(profile: Profile, ranks: int, bandwidth: float, *, num_microbatches: int, published: bool) -> Answer:
    """DAPPLE's plan, and what the simulator says of it under DAPPLE's two policies."""
    plan = plan_synchronous(
        profile, ranks=ranks, bandwidth=bandwidth, num_microbatches=num_microbatches, published=published
    )
    simulated = {}
    if num_microbatches * len(plan.stages) <= _MOST_SIMULATED:
        simulated = {name: plan.simulate(find(name)) for name in ("1f1b", "dapple-pb")}
    answer: dict[str, Any] = {
        "stages": [{"layers": [first, last], "replicas": replicas} for first, last, replicas in plan.stages],
        "step_seconds": plan.step_seconds,
        "simulated_seconds": simulated,
        "ties": _ties(profile, [(first, last) for first, last, _ in plan.stages]),
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
        *_shared(answer["ties"]),
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


def _in_flight(found: Partition, noam_seconds: float, memory_cap: float | None) -> tuple[bool, list[str]]:
    """Whether to train with `full` in flight, and a line that says why; none where NOAM reaches the period."""
    if noam_seconds <= found.period_seconds * _NEARLY:
        return False, []
    noam = ", ".join(str(stage.in_flight) for stage in found.stages)
    full = ", ".join(str(stage.full_in_flight) for stage in found.stages)
    size = bytes_text(found.full_memory_bytes)
    slower = f"takes {seconds_text(noam_seconds)}"
    if memory_cap is not None and found.full_memory_bytes > memory_cap:
        return False, [
            f"a minibatch {slower} with NOAM in flight ({noam}), which keeps the cap; --in-flight full ({full}) gives "
            f"the period and breaks it: {size} on the fullest rank"
        ]
    return True, [
        f"a minibatch {slower} with NOAM in flight ({noam}); --in-flight full ({full}) gives the period: {size} on the "
        "fullest rank"
    ]


def _ties(profile: Profile, stages: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Weights that several of the stages (first layer, last layer) hold: their bytes, and which stages."""
    found = []
    for size, layers in profile.ties:
        homes = [k for k, (first, last) in enumerate(stages) if any(first <= layer <= last for layer in layers)]
        if len(homes) > 1:
            found.append({"bytes": size, "stages": homes})
    return found


def _shared(ties: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"stages {', '.join(map(str, tie['stages']))} hold the same weights of {bytes_text(tie['bytes'])} each: the "
        "sums of their gradients between the stages are not in these times"
        for tie in ties
    ]


def _train(profile: Profile, found: Partition, full: bool, run: Mapping[str, Any]) -> list[str]:
    """How to train so: a command for pipeloom's GPT, and for the model of a file what to pass in Python; or why not.

    The layers of a file may have the names of those of the GPT and be others.
    """
    layers = [[layer.name for layer in profile.layers[stage.first : stage.last + 1]] for stage in found.stages]
    replicas = [stage.replicas for stage in found.stages]
    measured_here = bool(run)
    try:
        command = stream_command(replicas, layers, full=full, options=run, tied=bool(profile.ties))
        lines = [f"{'train it' if measured_here else 'a GPT of pipeloom so'}: {command}"]
    except InputError as error:
        lines = [f"pipeloom train cannot run this: {error}"]
    if measured_here:
        return lines
    if _ties(profile, [(stage.first, stage.last) for stage in found.stages]):
        return ["no stream can train it: the stages that hold the same weights update at different times; untie them"]
    in_flight = "full" if full else "noam"
    words = [
        f"num_ranks={sum(replicas)}",
        f"num_microbatches={steady_length(replicas, in_flight=in_flight)}",
        f"replicas={replicas}",
        *(["in_flight='full'"] if full else []),
    ]
    cut = [stage.last - stage.first + 1 for stage in found.stages]
    return [f"train it in Python: pl.Pipeline(..., pl.schedules.pipedream({', '.join(words)}), cut={cut})", *lines]


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
