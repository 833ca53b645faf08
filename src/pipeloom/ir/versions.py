"""Which version of its parameters a stage uses for which micro-batch, and how many versions a rank holds.

A schedule whose parameters change while it runs is one stream of micro-batches without a flush. Of a stage,
`microbatches_per_update` micro-batches in a row make an update; a stage with replicas updates once every replica had
its equal share. Version v is what a stage holds after v updates.

    stash            F uses the newest version there is, B the one that its own F used
    vertical         both use the version that has seen what the input stage's newest had seen when the micro-batch
                     entered
    double-buffer    batch k uses version k-1 on every stage (batch 0 and 1 version 0), forward and backward

    B0 STEP0 F3 B1 STEP1                  a stage on one rank updates directly behind the last backward of an update
    B0 REDUCE_GRAD0 F4 B2 REDUCE_GRAD2 STEP0     a replica gives its gradient away and goes on: the others' come while
                                                 it runs the next micro-batch, and it updates behind that

Replicas that waited for each other at once would from then on run at the same time, and what they need comes one after
the other: with replicas (2, 1, 1) and as much work on every rank, that would cost a third of the throughput.

Sources: PipeDream (Narayanan et al., SOSP 2019, section 3.3) and PipeDream-2BW (arXiv:2006.09503, section 3.1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.large.proof import proof_of
from pipeloom.ir.schedule import Schedule, Uses, WeightPolicy, once_per_schedule

_LAST_BACKWARDS = (Op.B, Op.W)


def num_updates(schedule: Schedule, stage: int) -> int:
    """How many updates `stage` makes in the whole stream."""
    return schedule.num_microbatches // schedule.update_interval(stage)


def batches_between_drains(schedule: Schedule) -> int:
    """A stream can end after so many batches, and after multiples of it: then every stage has updated."""
    assert schedule.microbatches_per_update is not None
    return schedule.update_period // schedule.microbatches_per_update


def check_drained(schedule: Schedule, num_batches: int, seen: str) -> None:
    """Refuse to go on from where a stream of this schedule cannot have ended.

    Args:
        schedule: of a stream.
        num_batches: that were run before.
        seen: words that say so, with which the error begins.

    Raises:
        InputError: not every stage has updated after so many.
    """
    each = batches_between_drains(schedule)
    if num_batches % each:
        replicas = ",".join(str(len(ranks)) for ranks in schedule.placement.replicas)
        raise InputError(
            f"{seen}: with replicas {replicas} all stages have updated after every {each} batches, and a stream "
            f"continues from there. Use a multiple of {each}, or other replicas."
        )


def with_updates(schedule: Schedule, rank: int) -> Iterator[Action]:
    """A rank's order with its updates: STEP with the update's number in place of the micro-batch.

    Where a stage has replicas, a REDUCE_GRAD comes before, with the rank's last micro-batch of the update.
    """
    order = schedule.orders[rank]
    behind: dict[int, list[Action]] = {}
    for stage, lane in _lanes(schedule, rank).items():
        replicas = schedule.placement.replicas[stage]
        first, interval = replicas.index(rank) - len(replicas), schedule.update_interval(stage)
        if len(replicas) > 1:
            for update, position in enumerate(lane.complete):
                last = first + (update + 1) * interval
                behind.setdefault(position, []).append(Action(stage, Op.REDUCE_GRAD, last))
        for update, position in enumerate(lane.steps):
            behind.setdefault(position, []).append(Action(stage, Op.STEP, update))
    for position, action in enumerate(order):
        yield action
        yield from behind.get(position, ())
    yield from behind.get(len(order), ())


@once_per_schedule
def versions_used(schedule: Schedule) -> Uses:
    """The version that F and B of each stage and micro-batch of a stream use.

    Raises:
        ScheduleError: an F stands before the update that makes its version.
    """
    newest = _newest_at_forward(schedule)
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
                    f"parameters by weight policy {schedule.weights.value!r}, but stands before the update that makes "
                    f"it; take more micro-batches an update, now {schedule.microbatches_per_update}"
                )
            used[stage, microbatch] = version
    return used


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most versions of a stage that exist at once.

    A version lives from its update until the next one, or until the last backward that uses it if that comes later.
    """
    used = versions_used(schedule)
    lives = (_lives(schedule, rank, used) for rank in range(schedule.num_ranks))
    return tuple(max((int(_most((life, 1) for life in each)) for each in of.values()), default=1) for of in lives)


def weight_version_bytes(schedule: Schedule, parameter_bytes: Sequence[float]) -> tuple[float, ...]:
    """For each rank, the most bytes of parameters that exist at once, all versions of its stages together.

    Args:
        schedule: any; one that flushes has one version.
        parameter_bytes: for each stage, those of one version.
    """
    if schedule.microbatches_per_update is None:
        return tuple(sum(parameter_bytes[stage] for stage in held) for held in schedule.placement.stages_of)
    used = versions_used(schedule)
    lives = (_lives(schedule, rank, used) for rank in range(schedule.num_ranks))
    return tuple(_most((life, parameter_bytes[s]) for s, each in of.items() for life in each) for of in lives)


class _Lane(NamedTuple):
    """What a rank runs of one stage; everywhere positions in the rank's order.

    Attributes:
        forwards, backwards: positions and micro-batches, W where a backward is split.
        complete: for each update, the backward with which it and all before it are complete.
        steps: for each update, the backward behind which its STEP stands; the length of the order for its end.
    """

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    complete: list[int]
    steps: list[int]


def _lanes(schedule: Schedule, rank: int) -> dict[int, _Lane]:
    """The stages of a rank, ascending."""
    lanes = {stage: _Lane([], [], [], []) for stage in schedule.placement.stages_of[rank]}
    order = schedule.orders[rank]
    if (proof := proof_of(schedule)) is not None:
        for stage, lane in lanes.items():
            lane.forwards.extend(proof.columns.places(rank, stage, Op.F))
            lane.backwards.extend(proof.columns.places(rank, stage, *_LAST_BACKWARDS))
    else:
        for position, (stage, op, microbatch, _) in enumerate(order):
            assert microbatch is not None
            if op is Op.F:
                lanes[stage].forwards.append((position, microbatch))
            elif op in _LAST_BACKWARDS:
                lanes[stage].backwards.append((position, microbatch))
    for stage, lane in lanes.items():
        interval = schedule.update_interval(stage)
        last = [0] * num_updates(schedule, stage)
        for position, microbatch in lane.backwards:
            last[microbatch // interval] = position
        lane.complete.extend(accumulate(last, max))
        if len(schedule.placement.replicas[stage]) == 1:
            lane.steps.extend(lane.complete)
        else:
            places = [position for position, _ in lane.backwards] + [len(order)]
            lane.steps.extend(places[bisect_right(places, position, 0, len(places) - 1)] for position in lane.complete)
    return lanes


def _lives(schedule: Schedule, rank: int, used: Uses) -> dict[int, list[tuple[int, int]]]:
    """For each stage, behind which positions of the rank's order each of its versions comes and goes."""
    lives = {}
    for stage, lane in _lanes(schedule, rank).items():
        goes = [*lane.steps, len(schedule.orders[rank])]
        for position, microbatch in lane.backwards:
            version = used[stage, microbatch]
            goes[version] = max(goes[version], position)
        lives[stage] = list(zip((-1, *lane.steps), goes, strict=True))
    return lives


def _most(lives: Iterable[tuple[tuple[int, int], float]]) -> float:
    """The most of what exists at once; what goes behind a position goes before what comes there."""
    events: list[tuple[int, float]] = []
    for (comes, goes), size in lives:
        events += ((comes, size), (goes, -size))
    events.sort()  # at one position, negative sizes first
    return max(accumulate(size for _, size in events), default=0.0)


def _newest_at_forward(schedule: Schedule) -> Uses:
    """The updates of its stage that stand before each forward."""
    newest: dict[tuple[int, int], int] = {}
    for rank in range(schedule.num_ranks):
        for stage, lane in _lanes(schedule, rank).items():
            made, count = 0, len(lane.steps)
            for position, microbatch in lane.forwards:
                while made < count and lane.steps[made] < position:
                    made += 1
                newest[stage, microbatch] = made
    return newest
