"""When a rank gathers a stage's parameters, lets go of them, and reduces their gradients over copies of the pipeline.

A rank's computations fall into groups that nothing may come between: one computation, or an overlapped pair. For every
stage, a run is a row of groups that hold it: all of the step, those one behind the other, or each by itself.

    granularity step         0UNSHARD 0F0 0F1 1UNSHARD 1F0 1F1 1B0 1B1 1REDUCE_GRAD1 1RESHARD 0B0 0B1 0REDUCE_GRAD1 ...
    granularity chunk        0UNSHARD 0F0 0F1 0RESHARD 1UNSHARD 1F0 ...

UNSHARD only begins the gathering, and REDUCE_GRAD the reduction: the first computation that needs the parameters waits
for the one, the end of the program for the other. A REDUCE_GRAD of the data axis has the micro-batch of the last
backward that it covers; one without is the sum over ranks of the pipeline that hold the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.data_axis import DataAxis, Granularity
from pipeloom.ir.schedule import Program

_BACKWARDS = frozenset({Op.B, Op.W})  # those that add to gradients
_RECEIVES = frozenset({Op.RECV_F, Op.RECV_B})
_SENDS = frozenset({Op.SEND_F, Op.SEND_B})


def insert_data_parallel(program: Program, data: DataAxis) -> Program:
    """Put UNSHARD, RESHARD and REDUCE_GRAD of a data axis into a program with communication.

    Without gradients (`Schedule.forward_only`) nothing is reduced.
    """
    orders = []
    for rank, order in enumerate(program.orders):
        front: dict[int, list[Action]] = {}
        behind: dict[int, list[Action]] = {}
        groups = _groups(order, program)
        for stage in program.placement.stages_of[rank]:
            _plan_stage(stage, order, groups, program, data, front, behind)
        orders.append(_woven(order, front, behind))
    return replace(program, orders=tuple(orders), data=data)


def _groups(order: Sequence[Action], program: Program) -> list[tuple[int, int]]:
    """First and last position of every group of computations, with the receives before and the sends behind it."""
    partners = program.schedule.partners
    groups: list[tuple[int, int]] = []
    position, free = 0, 0
    while position < len(order):
        action = order[position]
        if action.op not in COMPUTE_OPS:
            position += 1
            continue
        first = position
        while first > free and order[first - 1].op in _RECEIVES:
            first -= 1
        last = position + (action in partners)
        while last + 1 < len(order) and order[last + 1].op in _SENDS:
            last += 1
        groups.append((first, last))
        position = free = last + 1
    return groups


def _plan_stage(
    stage: int,
    order: Sequence[Action],
    groups: Sequence[tuple[int, int]],
    program: Program,
    data: DataAxis,
    front: dict[int, list[Action]],
    behind: dict[int, list[Action]],
) -> None:
    """What stands in front of and behind positions of `order` for one stage."""
    mine = [
        (index, [a for a in order[first : last + 1] if a.stage == stage and a.op in COMPUTE_OPS])
        for index, (first, last) in enumerate(groups)
    ]
    mine = [(index, actions) for index, actions in mine if actions]
    gather = data.granularity if data.shards_parameters else Granularity.STEP
    if data.unshards:
        reading = [index for index, actions in mine if any(action.op is not Op.W for action in actions)]
        for first_group, last_group in _runs(reading, gather):
            front.setdefault(groups[first_group][0], []).append(Action(stage, Op.UNSHARD))
            if data.shards_parameters:
                behind.setdefault(groups[last_group][1], []).append(Action(stage, Op.RESHARD))
    if program.schedule.forward_only:
        return
    reduce = data.granularity if data.shards_gradients else Granularity.STEP
    used = dict(mine)
    for first_group, last_group in _runs([index for index, _ in mine], reduce):
        backwards = [
            (index, action)
            for index in range(first_group, last_group + 1)
            for action in used.get(index, ())
            if action.op in _BACKWARDS
        ]
        if backwards:
            index, last = backwards[-1]
            behind.setdefault(groups[index][1], []).append(last.with_op(Op.REDUCE_GRAD))


def _runs(indices: Sequence[int], granularity: Granularity) -> list[tuple[int, int]]:
    """First and last of every run of `indices`, which ascend."""
    runs: list[tuple[int, int]] = []
    for index in indices:
        joins = granularity is Granularity.STEP or (
            granularity is Granularity.CHUNK and runs[-1:] and index == runs[-1][1] + 1
        )
        if runs and joins:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _woven(
    order: Sequence[Action], front: dict[int, list[Action]], behind: dict[int, list[Action]]
) -> tuple[Action, ...]:
    result: list[Action] = []
    for position, action in enumerate(order):
        result += front.get(position, ())
        result.append(action)
        result += behind.get(position, ())
    return tuple(result)
