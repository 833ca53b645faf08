"""Blocks of a rank's order: one computation or an overlapped pair, with its messages."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeloom.ir.action import COMPUTE_OPS, RECEIVES, SENDS, Action
from pipeloom.ir.schedule import Program


class ComputeBlock(NamedTuple):
    """One computation, or an overlapped pair, with the receives before and the sends after it.

    Attributes:
        first, last: positions of its first and last action in the order of the rank.
        computations: one action, or two.
    """

    first: int
    last: int
    computations: tuple[Action, ...]


def blocks_of(order: Sequence[Action], program: Program) -> list[ComputeBlock]:
    """The blocks of one rank's `order`. Other actions are in no block."""
    partners, length = program.schedule.partners, len(order)
    blocks: list[ComputeBlock] = []
    position = first = 0  # of the action that is looked at, and of the receives before it
    while position < length:
        op = order[position].op
        if op in COMPUTE_OPS:
            last = position + (bool(partners) and order[position] in partners)
            computations = tuple(order[position : last + 1])
            while last + 1 < length and order[last + 1].op in SENDS:
                last += 1
            blocks.append(ComputeBlock(first, last, computations))
            position = first = last + 1
        else:
            position += 1
            first = first if op in RECEIVES else position
    return blocks


def woven(
    order: Sequence[Action], front: Mapping[int, Sequence[Action]], behind: Mapping[int, Sequence[Action]]
) -> tuple[Action, ...]:
    """`order` with actions inserted before and after some positions."""
    result: list[Action] = []
    done = 0
    for position in sorted({*front, *behind}):
        result += order[done:position]
        result += front.get(position, ())
        result.append(order[position])
        result += behind.get(position, ())
        done = position + 1
    return (*result, *order[done:])
