"""What every rank can do of a step before anybody runs a backward."""

from __future__ import annotations

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, dependencies

_FORWARD = frozenset({Op.F, Op.SEND_F, Op.RECV_F})


def warm_up_lengths(program: Program) -> tuple[int, ...]:
    """For each rank, how many of its first actions run before its first backward and need no backward anywhere.

    These actions need nothing but each other, so all ranks can run them whatever else they wait for afterwards: a wait
    put behind them on every rank closes no circle. What they did can be thrown away and done again, since forwards
    change no gradient.
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
