"""Every computation of a schedule stands once, on the rank that holds its stage, or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.schedule import Schedule


def check_complete(schedule: Schedule) -> None:
    """Every computation exactly once, and on a rank that holds its stage: one walk, which no size makes longer.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    pieces, sliced = range(schedule.num_slices), schedule.num_slices > 1
    replicas, split, forward_only = schedule.placement.replicas, schedule.split_backwards, schedule.forward_only
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            stage, op, microbatch, piece = action
            if (
                op not in COMPUTE_OPS
                or stage not in stages
                or microbatch is None
                or microbatch not in microbatches
                or (piece is not None) is not sliced
                or (sliced and piece not in pieces)
                or (ranks := replicas[stage])[microbatch % len(ranks)] != rank
            ):
                refuse_place(schedule, action, rank, COMPUTE_OPS)
            if action in seen:
                raise ScheduleError(
                    f"schedule {schedule.name!r}: {action} stands twice on rank {rank}; each action runs once: drop one"
                )
            seen.add(action)
            if op is Op.F or (op is Op.I and not forward_only):
                continue
            if forward_only or ((stage, microbatch, piece) in split) is (op is Op.B):
                raise ScheduleError(
                    f"schedule {schedule.name!r}: {action} on rank {rank} is one too many: a backward is either B or I "
                    "and W, and a forward-only schedule has none; drop it"
                )
    # What stands is due and stands once, so it is all there if there is enough of it.
    cells = schedule.num_stages * schedule.num_microbatches * schedule.num_slices
    due = cells if forward_only else 2 * cells + len(split)
    if len(seen) < due:
        missing = next(action for action in _due(schedule) if action not in seen)
        assert missing.microbatch is not None
        raise ScheduleError(
            f"schedule {schedule.name!r}: {missing} is missing: every stage runs every micro-batch; add it to rank "
            f"{schedule.placement.rank_of(missing.stage, missing.microbatch)}"
        )


def refuse_place(schedule: Schedule, action: Action, rank: int, ops: frozenset[Op]) -> NoReturn:
    """Say why `action` cannot stand on `rank`, among `ops`.

    Raises:
        ScheduleError: always.
    """
    stage, op, microbatch, _ = action
    at = f"schedule {schedule.name!r}: {action} on rank {rank}"
    if op not in ops:
        raise ScheduleError(
            f"{at}: a schedule holds F, B, I and W alone; drop it, pipeloom.passes.lower puts the others in"
        )
    if not 0 <= stage < schedule.num_stages:
        raise ScheduleError(f"{at}: stages are 0..{schedule.num_stages - 1}; correct its stage, or the placement")
    if microbatch is None or not 0 <= microbatch < schedule.num_microbatches:
        raise ScheduleError(
            f"{at}: micro-batches are 0..{schedule.num_microbatches - 1}; correct its number, or num_microbatches"
        )
    home = schedule.placement.rank_of(stage, microbatch)
    if home != rank:
        raise ScheduleError(
            f"schedule {schedule.name!r}: {action} is on rank {rank}, but stage {stage} runs micro-batch {microbatch} "
            f"on rank {home}; move it there"
        )
    if schedule.num_slices == 1:
        raise ScheduleError(f"{at}: micro-batches are not cut into slices; leave its slice out, or raise num_slices")
    raise ScheduleError(
        f"{at}: slices are 0..{schedule.num_slices - 1}, as in {stage}{op}{microbatch}.0; correct its slice"
    )


def _due(schedule: Schedule) -> Iterator[Action]:
    """All computations of a schedule, one after the other: there can be more of them than fit anywhere."""
    pieces = (None,) if schedule.num_slices == 1 else range(schedule.num_slices)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for piece in pieces:
                yield Action(stage, Op.F, microbatch, piece)
                if not schedule.forward_only:
                    split = (stage, microbatch, piece) in schedule.split_backwards
                    yield from (Action(stage, op, microbatch, piece) for op in ((Op.I, Op.W) if split else (Op.B,)))
