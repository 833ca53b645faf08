"""Move activations off the device between their forward and their backward, so that a rank holds fewer at once.

    at most 3, one move beside a computation
    before   0F0 0F1 0F2 0F3          0B0 0B1 ...
    after    0F0 0OFFLOAD0 0F1 0F2 0F3 0RELOAD0 ... 0B0 0B1

OFFLOAD begins the move, directly behind the forward; RELOAD begins the way back, in front of an earlier computation
than the backward that needs it, and that backward waits for its end. So a move runs beside `beside` computations, which
is what double buffering comes to: while it lasts, the activation still counts, or counts already.

Which ones move: wherever a rank holds too much, those that are used last (Belady, 1966). For activations of equal size
no choice of fewer moves keeps the cap. Adaptive, selective moving of activations is also in arXiv:2503.01328.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program
from pipeloom.passes.groups import Group, groups_of, woven

_SLACK = 1 + 1e-9  # sums of sizes are not exact


class _Entry(NamedTuple):
    """What one forward keeps. Numbers are of groups of the rank's order.

    Attributes:
        forward: the action that makes it, in group `made`.
        leaves: the first group in whose time it could be off the device.
        returns: the first in whose time it has to be there again.
        used: that of the B or I.
        freed: that of the B or W.
    """

    forward: Action
    made: int
    leaves: int
    returns: int
    used: int
    freed: int


def insert_offload(
    program: Program,
    most: float | Sequence[float],
    *,
    sizes: Sequence[float] | None = None,
    beside: int = 1,
) -> Program:
    """Put OFFLOAD and RELOAD of activations into `program`, so that no rank holds more than `most`.

    Args:
        program: with communication, and a data axis if it has one.
        most: what a rank may hold at once, one number or one for each rank; in activations of one stage and
            micro-batch (or slice), or in the unit of `sizes`, such as bytes.
        sizes: for each stage, what one F keeps; 1 if not given.
        beside: beside how many computations a move runs; 0: it is waited for at once.

    Raises:
        InputError: no moves keep the cap; the message has the least that they can.
    """
    if program.schedule.forward_only:
        return program
    count = program.num_ranks
    caps = tuple(most) if isinstance(most, Sequence) else (most,) * count
    weights = tuple(sizes) if sizes is not None else (1.0,) * program.schedule.num_stages
    if len(caps) != count or len(weights) != program.schedule.num_stages:
        raise InputError(
            f"{len(caps)} caps for {count} ranks, {len(weights)} sizes for {program.schedule.num_stages} stages: give "
            "one for each"
        )
    plans = [_Plan(groups_of(order, program), program, weights, beside) for order in program.orders]
    found = [plan.moves(cap) for plan, cap in zip(plans, caps, strict=True)]
    for rank, moves in enumerate(found):
        if moves is None:
            least = plans[rank].least()
            raise InputError(
                f"rank {rank} of {program.name!r} may hold {caps[rank]:g} of activations: moves beside "
                f"{counted(beside, 'computation')} need {least:g}; raise the cap"
            )
    orders = tuple(
        _with_moves(order, plan.groups, moves or [], beside)
        for order, plan, moves in zip(program.orders, plans, found, strict=True)
    )
    return replace(program, orders=orders)


def least_held(program: Program, *, beside: int = 1) -> tuple[float, ...]:
    """The lowest cap of each rank, in activations of one stage and micro-batch, that `insert_offload` can keep."""
    sizes = (1.0,) * program.schedule.num_stages
    return tuple(_Plan(groups_of(order, program), program, sizes, beside).least() for order in program.orders)


def _with_moves(
    order: Sequence[Action], groups: Sequence[Group], moves: Sequence[_Entry], beside: int
) -> tuple[Action, ...]:
    front: defaultdict[int, list[Action]] = defaultdict(list)
    behind: defaultdict[int, list[Action]] = defaultdict(list)
    for entry in sorted(moves, key=lambda entry: entry.used):
        behind[groups[entry.made].last].append(entry.forward.with_op(Op.OFFLOAD))
        front[groups[entry.used - beside].first].append(entry.forward.with_op(Op.RELOAD))
    return woven(order, front, behind)


class _Plan:
    """One rank: what it holds in the time of every group, and what could be away."""

    def __init__(self, groups: Sequence[Group], program: Program, sizes: Sequence[float], beside: int) -> None:
        self.groups = groups
        self.sizes = sizes
        self.entries = _entries(groups, program, beside)

    def moves(self, cap: float) -> list[_Entry] | None:
        """The fewest moves that keep `cap`, where sizes are equal; None if none do."""
        leave: defaultdict[int, list[_Entry]] = defaultdict(list)
        change = [0.0] * (len(self.groups) + 1)
        for entry in self.entries:
            change[entry.made] += self.sizes[entry.forward.stage]
            change[entry.freed + 1] -= self.sizes[entry.forward.stage]
            if entry.leaves < entry.returns:
                leave[entry.leaves].append(entry)
        held = 0.0
        away: list[tuple[int, _Entry]] = []  # what could be, the last to return first
        found: list[_Entry] = []
        for now in range(len(self.groups)):
            held += change[now]
            for entry in leave[now]:
                heapq.heappush(away, (-entry.returns, entry))
            while held > cap * _SLACK:
                if not away or -away[0][0] <= now:
                    return None
                _, entry = heapq.heappop(away)
                size = self.sizes[entry.forward.stage]
                held -= size
                change[entry.returns] += size
                found.append(entry)
        return found

    def least(self) -> float:
        """The lowest cap that moves can keep: with all entries away that can be."""
        change = [0.0] * (len(self.groups) + 1)
        for entry in self.entries:
            size = self.sizes[entry.forward.stage]
            change[entry.made] += size
            change[entry.freed + 1] -= size
            if entry.leaves < entry.returns:
                change[entry.leaves] -= size
                change[entry.returns] += size
        held = peak = 0.0
        for step in change:
            held += step
            peak = max(peak, held)
        return peak


def _entries(groups: Sequence[Group], program: Program, beside: int) -> list[_Entry]:
    split = program.schedule.split_backwards
    made: dict[tuple[int, int | None, int | None], tuple[int, Action]] = {}
    used: dict[tuple[int, int | None, int | None], int] = {}
    entries = []
    for index, group in enumerate(groups):
        for action in group.computations:
            key = (action.stage, action.microbatch, action.slice)
            if action.op is Op.F:
                made[key] = (index, action)
                continue
            used.setdefault(key, index)
            if action.op is Op.W or (action.op is Op.B and key not in split):
                at, forward = made[key]
                entries.append(_Entry(forward, at, at + 1 + beside, used[key] - beside, used[key], index))
    return entries
