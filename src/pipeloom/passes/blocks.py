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
    partners = program.schedule.partners
    blocks: list[ComputeBlock] = []
    position = free = 0
    while position < len(order):
        action = order[position]
        if action.op not in COMPUTE_OPS:
            position += 1
            continue
        first = position
        while first > free and order[first - 1].op in RECEIVES:
            first -= 1
        last = position + (action in partners)
        computations = tuple(order[position : last + 1])
        while last + 1 < len(order) and order[last + 1].op in SENDS:
            last += 1
        blocks.append(ComputeBlock(first, last, computations))
        position = free = last + 1
    return blocks


def woven(
    order: Sequence[Action], front: Mapping[int, Sequence[Action]], behind: Mapping[int, Sequence[Action]]
) -> tuple[Action, ...]:
    """`order` with actions inserted before and after some positions."""
    result: list[Action] = []
    for position, action in enumerate(order):
        result += front.get(position, ())
        result.append(action)
        result += behind.get(position, ())
    return tuple(result)
