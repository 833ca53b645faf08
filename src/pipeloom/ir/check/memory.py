"""What is legal of a program's parameters, gradients and activations, wherever they are kept.

    parameters     UNSHARD and RESHARD of a stage alternate; where copies hold shards, F, B and I stand between them
    gradients      every B and W is covered by a later REDUCE_GRAD, which has the micro-batch of the last it covers
    shared         REDUCE_GRAD without a micro-batch, once, behind all others: parameters that several ranks hold
    activations    F ... OFFLOAD ... RELOAD ... B or I, each once

All rules are of one rank's order: what another rank or copy does is checked there.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NoReturn

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program
from pipeloom.ir.versions import with_updates

_READS = frozenset({Op.F, Op.B, Op.I})
_GATHERS = frozenset({Op.UNSHARD, Op.RESHARD})
_MOVES = frozenset({Op.OFFLOAD, Op.RELOAD})
_Entry = tuple[int, int | None, int | None]


def check_reductions(program: Program) -> None:
    """Every rank of a gradient group meets the others once, after all its backwards of the group's stages.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    group_of = {stage: group for group in program.gradient_groups for stage in group}
    if program.schedule.microbatches_per_update is not None:
        _check_stream(program)
        return
    for rank, order in enumerate(program.orders):
        met: set[tuple[int, ...]] = set()
        for action in order:
            group = group_of.get(action.stage)
            of_data = action.op is Op.REDUCE_GRAD and action.microbatch is not None and program.data is not None
            if of_data and group not in met:
                continue
            if action.op is Op.REDUCE_GRAD and (group is None or rank not in program.ranks_of_group(group)):
                raise ScheduleError(
                    f"program {program.name!r}: {action} on rank {rank}, which shares no gradients of stage "
                    f"{action.stage} with another rank: drop it, or name the group in gradient_groups"
                )
            if group in met and action.op in (Op.REDUCE_GRAD, Op.B, Op.W):
                raise ScheduleError(
                    f"program {program.name!r}: {action} on rank {rank} comes after the gradients of stages {group} "
                    "were summed: a step sums them once, after the last backward; move REDUCE_GRAD to the end"
                )
            if group is not None and action.op is Op.REDUCE_GRAD:
                met.add(group)
        for group in program.gradient_groups:
            if rank in program.ranks_of_group(group) and group not in met:
                held = min(stage for stage in group if stage in program.placement.stages_of[rank])
                raise ScheduleError(
                    f"program {program.name!r}: {Action(held, Op.REDUCE_GRAD)} is missing: every rank with one of "
                    f"the stages {group} sums their gradients once; add it to the end of rank {rank}"
                )


def _check_stream(program: Program) -> None:
    """In a stream every update stands where the schedule has it, between the same forwards and backwards."""
    ops = (Op.F, Op.B, Op.W, Op.REDUCE_GRAD, Op.STEP)
    for rank, order in enumerate(program.orders):
        expected = (action for action in with_updates(program.schedule, rank) if action.op in ops)
        found = (action for action in order if action.op in ops)
        wrong = next(((want, got) for want, got in zip_longest(expected, found) if want != got), None)
        if wrong is not None:
            raise ScheduleError(
                f"program {program.name!r}: rank {rank} runs {wrong[1]} where {wrong[0]} has to stand: updates come "
                "behind the last backward of their micro-batches, and no forward changes sides; lower the schedule "
                "with pipeloom.passes.lower"
            )


def check_data_axis(program: Program) -> None:
    """The rules of parameters and gradients, rank by rank.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    for rank, order in enumerate(program.orders):
        _check_stages(program, rank)
        if program.data is None:
            odd = next((action for action in order if action.op in _GATHERS), None)
            if odd is not None:
                _refuse(program, odd, rank, "the program has no data axis", "give it one, or drop the action")
            continue
        _check_parameters(program, rank)
        if program.schedule.microbatches_per_update is None:
            _check_gradients(program, rank)


def _check_stages(program: Program, rank: int) -> None:
    """What concerns a stage as a whole stands on a rank that holds it."""
    held = program.placement.stages_of[rank]
    for action in program.orders[rank]:
        if action.op in _GATHERS or action.op is Op.REDUCE_GRAD:
            if action.stage not in held:
                _refuse(program, action, rank, f"it holds stages {held}", "move it to a rank that holds the stage")
            if action.op in _GATHERS and action.microbatch is not None:
                _refuse(program, action, rank, "parameters are those of all micro-batches", "leave the number out")


def _check_parameters(program: Program, rank: int) -> None:
    data = program.data
    assert data is not None
    there: set[int] = set()
    for action in program.orders[rank]:
        stage, op = action.stage, action.op
        if op is Op.UNSHARD:
            if not data.unshards:
                _refuse(program, action, rank, f"with {data.strategy.value} parameters are there always", "drop it")
            if stage in there:
                _refuse(program, action, rank, "the stage's parameters are there already", "drop it, or add a RESHARD")
            there.add(stage)
        elif op is Op.RESHARD:
            if not data.shards_parameters:
                _refuse(program, action, rank, f"with {data.strategy.value} parameters stay whole", "drop it")
            if stage not in there:
                _refuse(program, action, rank, "the stage's parameters are not there", "drop it, or add an UNSHARD")
            there.remove(stage)
        elif op in _READS and data.unshards and stage not in there:
            _refuse(program, action, rank, f"stage {stage} has no parameters there", "put an UNSHARD in front")
    if data.shards_parameters and there:
        missing = Action(min(there), Op.RESHARD)
        raise ScheduleError(
            f"program {program.name!r}: {missing} is missing: a step of zero3 ends with shards; add it to rank {rank}"
        )


def _check_gradients(program: Program, rank: int) -> None:
    data = program.data
    assert data is not None
    last: dict[int, Action] = {}  # of each stage, the last backward that no reduction covers
    reduced: set[int] = set()
    for action in program.orders[rank]:
        stage, op, microbatch, _ = action
        if op in (Op.B, Op.W):
            last[stage] = action
        elif op is Op.REDUCE_GRAD and microbatch is not None:
            covered = last.pop(stage, None)
            if covered is None:
                _refuse(program, action, rank, "no gradients came since the reduction before", "drop it")
            if covered.with_op(Op.REDUCE_GRAD) != action:
                _refuse(program, action, rank, f"the last backward before it is {covered}", "give it that micro-batch")
            if stage in reduced and not data.shards_gradients:
                _refuse(
                    program,
                    action,
                    rank,
                    f"with {data.strategy.value} whole gradients would be summed twice",
                    "reduce once, behind the last backward",
                )
            reduced.add(stage)
    if last:
        action = min(last.values())
        raise ScheduleError(
            f"program {program.name!r}: {action.with_op(Op.REDUCE_GRAD)} is missing: the copies sum the gradients of "
            f"every backward, and {action} is the last of its stage; add it to rank {rank}"
        )


def check_offload(program: Program) -> None:
    """The rules of activations that are moved off the device and back.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    for rank, order in enumerate(program.orders):
        made: set[_Entry] = set()
        away: set[_Entry] = set()
        moved: set[Action] = set()
        for action in order:
            entry = (action.stage, action.microbatch, action.slice)
            if action.op is Op.F and not program.schedule.forward_only:
                made.add(entry)
            elif action.op in _MOVES:
                if action in moved:
                    _refuse(program, action, rank, "an activation leaves and comes back once", "drop one")
                moved.add(action)
                leaves = action.op is Op.OFFLOAD
                if leaves and entry not in made:
                    _refuse(program, action, rank, "there is no activation of it to move", "put it behind its F")
                if not leaves and entry not in away:
                    _refuse(program, action, rank, "its activation is not away", "put it behind its OFFLOAD")
                (away.add if leaves else away.discard)(entry)
            elif action.op in (Op.B, Op.I):
                made.discard(entry)
                if entry in away:
                    _refuse(
                        program, action, rank, "its activation is away", f"put {action.with_op(Op.RELOAD)} in front"
                    )


def _refuse(program: Program, action: Action, rank: int, rule: str, fix: str) -> NoReturn:
    raise ScheduleError(f"program {program.name!r}: {action} on rank {rank}: {rule}; {fix}")
