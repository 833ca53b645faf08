"""Parameter versions: which version each micro-batch uses, and how many versions each rank holds.

A schedule that updates parameters while it runs is a stream of micro-batches without a flush. A stage updates after
`microbatches_per_update` micro-batches, or, if it has replicas, once each replica has run an equal number of them.
Version v of a stage has v updates.

    stash            F uses the newest version, B the version of its own F
    vertical         both use the version with the updates that the input stage had when the micro-batch entered
    double-buffer    batch k uses version k-1 on every stage (batch 0 and 1 version 0), forward and backward

    B0 STEP0 F3 B1 STEP1                         a stage on one rank updates directly after the last backward
    B0 REDUCE_GRAD0 F4 B2 REDUCE_GRAD2 STEP0     a replica sends its gradient and runs its next micro-batch meanwhile;
                                                 it updates after that

Replicas that waited for each other at once would run in lockstep from then on, but their inputs arrive one after the
other. With replicas (2, 1, 1) and equal work on every rank, throughput would drop by a third.

Sources: PipeDream (Narayanan et al., SOSP 2019, section 3.3) and PipeDream-2BW (arXiv:2006.09503, section 3.1).
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Schedule, Uses, WeightPolicy, once_per_schedule
from pipeloom.ir.walk import proof_of

_LAST_BACKWARDS = (Op.B, Op.W)


def num_updates(schedule: Schedule, stage: int) -> int:
    """The number of updates of `stage` in the whole stream."""
    return schedule.num_microbatches // schedule.update_interval(stage)


def check_drained(schedule: Schedule, num_batches: int, seen: str) -> None:
    """Validate that a stream of this schedule can end, and continue, after `num_batches`.

    Args:
        schedule: the schedule of a stream.
        num_batches: batches run so far.
        seen: the start of the error message.

    Raises:
        InputError: some stage has not updated after `num_batches`.
    """
    each = schedule.update_period // (schedule.microbatches_per_update or 1)
    if num_batches % each:
        replicas = ",".join(str(len(ranks)) for ranks in schedule.placement.replicas)
        raise InputError(
            f"{seen}: with replicas {replicas} all stages have updated after every {each} batches, and a stream "
            f"continues from there. Use a multiple of {each}, or other replicas."
        )


def with_updates(schedule: Schedule, rank: int) -> Iterator[Action]:
    """A rank's order with a STEP per update, whose `microbatch` is the number of the update.

    If a stage has replicas, a REDUCE_GRAD comes before it, with the rank's last micro-batch of the update.
    """
    order = schedule.orders[rank]
    behind: dict[int, list[Action]] = {}
    for stage, run in _stage_runs(schedule, rank).items():
        replicas = schedule.placement.replicas[stage]
        first, interval = replicas.index(rank) - len(replicas), schedule.update_interval(stage)
        if len(replicas) > 1:
            for update, position in enumerate(run.complete):
                last = first + (update + 1) * interval
                behind.setdefault(position, []).append(Action(stage, Op.REDUCE_GRAD, last))
        for update, position in enumerate(run.steps):
            behind.setdefault(position, []).append(Action(stage, Op.STEP, update))
    for position, action in enumerate(order):
        yield action
        yield from behind.get(position, ())
    yield from behind.get(len(order), ())


@once_per_schedule
def versions_used(schedule: Schedule) -> Uses:
    """The parameter version of each stage and micro-batch of a stream, for both F and B.

    Raises:
        ScheduleError: an F comes before the update that makes its version.
    """
    newest: dict[tuple[int, int], int] = {}  # for each forward, the number of updates of its stage before it
    for rank in range(schedule.num_ranks):
        for stage, run in _stage_runs(schedule, rank).items():
            made, count = 0, len(run.steps)
            for position, microbatch in run.forwards:
                while made < count and run.steps[made] < position:
                    made += 1
                newest[stage, microbatch] = made
    if schedule.weights is WeightPolicy.STASH:
        return newest
    intervals = [schedule.update_interval(stage) for stage in range(schedule.num_stages)]
    vertical = schedule.weights is WeightPolicy.VERTICAL
    used: dict[tuple[int, int], int] = {}
    for microbatch in range(schedule.num_microbatches):
        there = [newest[stage, microbatch] for stage in range(schedule.num_stages)]
        # Replicas update later than the input stage may: vertical takes the newest that all stages have.
        seen = min(version * interval for version, interval in zip(there, intervals, strict=True))
        for stage, interval in enumerate(intervals):
            version = seen // interval if vertical else max(microbatch // interval - 1, 0)
            if version > there[stage]:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: {Action(stage, Op.F, microbatch)} uses version {version} of the "
                    f"parameters by weight policy {schedule.weights.value!r}, but comes before the update that makes "
                    f"it. Increase microbatches_per_update={schedule.microbatches_per_update}."
                )
            used[stage, microbatch] = version
    return used


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the peak number of versions of a stage.

    A version lives from its update until the next one, or until the last backward that uses it if that comes later.
    """
    return tuple(
        max((int(_most((life, 1) for life in each)) for each in of.values()), default=1) for of in _lives(schedule)
    )


def weight_version_bytes(schedule: Schedule, parameter_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each rank, the peak bytes of parameters in all versions of its stages.

    Args:
        schedule: any schedule; a synchronous one has one version.
        parameter_bytes: for each stage, bytes of one version.
    """
    if schedule.microbatches_per_update is None:
        return tuple(sum(parameter_bytes[stage] for stage in held) for held in schedule.placement.stages_of)
    return tuple(
        _most((life, parameter_bytes[s]) for s, each in of.items() for life in each) for of in _lives(schedule)
    )


class _StageRun(NamedTuple):
    """Where a rank runs one stage; all numbers are positions in the rank's order.

    Attributes:
        forwards, backwards: positions and micro-batches; backwards are W if split.
        complete: for each update, the backward that completes it and all updates before it.
        steps: for each update, the backward before its STEP; the length of the order for a STEP at the end.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    complete: list[int]
    steps: list[int]


def _stage_runs(schedule: Schedule, rank: int) -> dict[int, _StageRun]:
    """The stages of a rank, ascending."""
    runs = {stage: _StageRun([], [], [], []) for stage in schedule.placement.stages_of[rank]}
    order = schedule.orders[rank]
    if (proof := proof_of(schedule)) is not None:
        for stage, run in runs.items():
            run.forwards.extend(proof.columns.places(rank, stage, Op.F))
            run.backwards.extend(proof.columns.places(rank, stage, *_LAST_BACKWARDS))
    else:
        for position, (stage, op, microbatch, _) in enumerate(order):
            assert microbatch is not None
            if op is Op.F:
                runs[stage].forwards.append((position, microbatch))
            elif op in _LAST_BACKWARDS:
                runs[stage].backwards.append((position, microbatch))
    for stage, run in runs.items():
        interval = schedule.update_interval(stage)
        last = [0] * num_updates(schedule, stage)
        for position, microbatch in run.backwards:
            last[microbatch // interval] = position
        run.complete.extend(accumulate(last, max))
        if len(schedule.placement.replicas[stage]) == 1:
            run.steps.extend(run.complete)
        else:
            places = [position for position, _ in run.backwards] + [len(order)]
            run.steps.extend(places[bisect_right(places, position, 0, len(places) - 1)] for position in run.complete)
    return runs


def _lives(schedule: Schedule) -> Iterator[dict[int, list[tuple[int, int]]]]:
    """For each rank, by stage, the positions in the rank's order after which each version is made and freed."""
    used = versions_used(schedule)
    for rank, order in enumerate(schedule.orders):
        lives = {}
        for stage, run in _stage_runs(schedule, rank).items():
            goes = [*run.steps, len(order)]
            for position, microbatch in run.backwards:
                version = used[stage, microbatch]
                goes[version] = max(goes[version], position)
            lives[stage] = list(zip((-1, *run.steps), goes, strict=True))
        yield lives


def _most(lives: Iterable[tuple[tuple[int, int], float]]) -> float:
    """The peak size; at one position, versions are freed before others are made."""
    events: list[tuple[int, float]] = []
    for (comes, goes), size in lives:
        events += ((comes, size), (goes, -size))
    events.sort()  # at one position, negative sizes first
    return max(accumulate(size for _, size in events), default=0.0)
