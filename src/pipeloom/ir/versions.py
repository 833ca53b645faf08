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
the other: with as much work on every stage that would cost up to half of the throughput (simulated).

Sources: PipeDream (Narayanan et al., SOSP 2019, section 3.3) and PipeDream-2BW (arXiv:2006.09503, section 3.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Schedule, WeightPolicy

Uses = dict[tuple[int, int], int]  # (stage, micro-batch) -> version


def num_updates(schedule: Schedule, stage: int) -> int:
    """How many updates `stage` makes in the whole stream."""
    return schedule.num_microbatches // schedule.update_interval(stage)


def with_updates(schedule: Schedule, rank: int) -> Iterator[Action]:
    """A rank's order with its updates: STEP with the update's number in place of the micro-batch.

    Where a stage has replicas, a REDUCE_GRAD with the micro-batch behind which it stands comes before.
    """
    updates = {stage: _Updates(schedule, stage) for stage in schedule.placement.stages_of[rank]}
    for action in schedule.orders[rank]:
        if action.op in _LAST_BACKWARDS:
            updates[action.stage].left[_update_of(schedule, action)] += 1
    for action in schedule.orders[rank]:
        yield action
        if action.op in _LAST_BACKWARDS:
            yield from updates[action.stage].behind(action)
    for stage in updates:
        yield from updates[stage].owed


_LAST_BACKWARDS = (Op.B, Op.W)


class _Updates:
    """The updates of one stage on one rank: how many backwards each still waits for, and which are owed."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self._schedule, self._stage = schedule, stage
        self._replicated = len(schedule.placement.replicas[stage]) > 1
        self.left = [0] * num_updates(schedule, stage)
        self.owed: list[Action] = []
        self._made = 0

    def behind(self, action: Action) -> Iterator[Action]:
        """What stands behind a backward."""
        self.left[_update_of(self._schedule, action)] -= 1
        owed, self.owed = self.owed, []
        while self._made < len(self.left) and not self.left[self._made]:
            step = Action(self._stage, Op.STEP, self._made)
            if self._replicated:
                yield action.with_op(Op.REDUCE_GRAD)
                self.owed.append(step)
            else:
                yield step
            self._made += 1
        yield from owed


def versions_used(schedule: Schedule) -> Uses:
    """The version that F and B of each stage and micro-batch use.

    Raises:
        ScheduleError: an F stands before the update that makes its version.
    """
    newest = _newest_at_forward(schedule)
    if schedule.weights is WeightPolicy.STASH:
        return newest
    intervals = [schedule.update_interval(stage) for stage in range(schedule.num_stages)]
    used: Uses = {}
    for (stage, microbatch), there in newest.items():
        if schedule.weights is WeightPolicy.VERTICAL:  # replicas update later: the newest that all stages have
            seen = min(newest[s, microbatch] * interval for s, interval in enumerate(intervals))
            version = seen // intervals[stage]
        else:
            version = max(microbatch // intervals[stage] - 1, 0)
        if version > there:
            raise ScheduleError(
                f"schedule {schedule.name!r}: {Action(stage, Op.F, microbatch)} uses version {version} of the "
                f"parameters by weight policy {schedule.weights.value!r}, but stands before the update that makes it; "
                f"take more micro-batches an update, now {schedule.microbatches_per_update}"
            )
        used[stage, microbatch] = version
    return used


def weight_versions(schedule: Schedule) -> tuple[int, ...]:
    """For each rank, the most versions of a stage that exist at once.

    A version lives from its update until the next one, or until the last backward that uses it if that comes later.
    """
    used = versions_used(schedule)
    return tuple(max(_held(schedule, rank, used), default=1) for rank in range(schedule.num_ranks))


def last_uses(schedule: Schedule, rank: int, used: Uses) -> dict[tuple[int, int], Action]:
    """For each stage and version that micro-batches of `rank` use, the backward after which nobody does."""
    last = {}
    for action in schedule.orders[rank]:
        if action.op in _LAST_BACKWARDS:
            assert action.microbatch is not None
            last[action.stage, used[action.stage, action.microbatch]] = action
    return last


def _held(schedule: Schedule, rank: int, used: Uses) -> Iterator[int]:
    """After every update, how many versions of its stage exist on `rank`."""
    last = last_uses(schedule, rank, used)
    wanted = {stage: {v for s, v in last if s == stage} for stage in schedule.placement.stages_of[rank]}
    for action in with_updates(schedule, rank):
        stage, op, number, _ = action
        if op in _LAST_BACKWARDS:
            assert number is not None
            if last[stage, used[stage, number]] == action:
                wanted[stage].discard(used[stage, number])
        elif op is Op.STEP:
            assert number is not None
            yield 1 + sum(version <= number for version in wanted[stage])


def _newest_at_forward(schedule: Schedule) -> Uses:
    newest: Uses = {}
    for rank in range(schedule.num_ranks):
        made = Counter[int]()
        for stage, op, number, _ in with_updates(schedule, rank):
            if op is Op.STEP:
                made[stage] += 1
            elif op is Op.F:
                assert number is not None
                newest[stage, number] = made[stage]
    return newest


def _update_of(schedule: Schedule, action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch // schedule.update_interval(action.stage)
