"""The warm-up of each rank: its actions before any rank runs a backward."""

from __future__ import annotations

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, dependencies

_FORWARD = frozenset({Op.F, Op.SEND_F, Op.RECV_F})


def warm_up_lengths(program: Program) -> tuple[int, ...]:
    """For each rank, the number of its first actions that need no backward of any rank.

    These actions depend only on each other, so a barrier after them on every rank cannot deadlock. They can be
    discarded and run again, because forwards do not change gradients.
    """
    length = [0] * program.num_ranks
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(program.orders):
            start = length[rank]
            for action in order[start:]:
                if action.op not in _FORWARD or not done.issuperset(dependencies(action, program)):
                    break
                done.add(action)
                length[rank] += 1
            moved = moved or length[rank] > start
    return tuple(length)
