"""Offload activations between forward and backward to reduce peak memory.

    cap 3, transfers overlap with one computation
    before   0F0 0F1 0F2 0F3          0B0 0B1 ...
    after    0F0 0OFFLOAD0 0F1 0F2 0F3 0RELOAD0 ... 0B0 0B1

OFFLOAD starts a transfer directly after the forward. RELOAD starts the transfer back, `beside` computations before the
backward that needs the activation; that backward waits for its end. A transfer thus overlaps with `beside`
computations, as in double buffering. The activation counts as held during both transfers.

If a rank exceeds its cap, the activations that are used last are offloaded (Belady, 1966). For activations of equal
size this is the smallest number of transfers. arXiv:2503.01328 also offloads activations selectively.
"""

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError
from pipeloom.ir import Action, Op, Program
from pipeloom.passes.blocks import ComputeBlock, blocks_of, woven

_SLACK = 1 + 1e-9  # rounding of sums of sizes


class _Activation(NamedTuple):
    """The activation of one forward. Numbers count blocks of the rank's order.

    Attributes:
        forward: the action that makes it, in block `made`.
        leaves: the first block during which it can be offloaded.
        returns: the first block during which it must be back.
        used: the block of the B or I.
        freed: the block of the B or W.
    """

    forward: Action
    made: int
    leaves: int
    returns: int
    used: int
    freed: int


def insert_offload(
    program: Program, most: float | Sequence[float], *, sizes: Sequence[float] | None = None, beside: int = 1
) -> Program:
    """Insert OFFLOAD and RELOAD of activations into `program`, so that no rank holds more than `most`.

    Args:
        program: a program with communication, and with a data axis if it has one.
        most: the cap of all ranks, or one cap per rank, in activations of one stage and micro-batch (or slice), or in
            the unit of `sizes`.
        sizes: for each stage, the size of one F's activation, such as bytes; default 1.
        beside: the number of computations that a transfer overlaps with; 0 waits for each transfer at once.

    Raises:
        InputError: offloading cannot keep the cap; the message has the lowest possible cap.
    """
    if program.schedule.forward_only:
        return program
    count = program.num_ranks
    caps = tuple(most) if isinstance(most, Sequence) else (most,) * count
    weights = tuple(sizes) if sizes is not None else (1.0,) * program.schedule.num_stages
    if len(caps) != count or len(weights) != program.schedule.num_stages:
        raise InputError(
            f"{len(caps)} caps for {count} ranks, {len(weights)} sizes for {program.schedule.num_stages} stages: must "
            "have one cap per rank and one size per stage."
        )
    plans = [_Plan(blocks_of(order, program), program, weights, beside) for order in program.orders]
    found = [plan.moves(cap) for plan, cap in zip(plans, caps, strict=True)]
    for rank, moves in enumerate(found):
        if moves is None:
            least = plans[rank].least()
            raise InputError(
                f"rank {rank} of {program.name!r} has a cap of {caps[rank]:g} on activations: offloading that overlaps "
                f"with {counted(beside, 'computation')} needs {least:g}. Raise the cap."
            )
    orders = []
    for order, plan, moves in zip(program.orders, plans, found, strict=True):
        front: defaultdict[int, list[Action]] = defaultdict(list)
        behind: defaultdict[int, list[Action]] = defaultdict(list)
        for entry in sorted(moves or (), key=lambda entry: entry.used):
            behind[plan.blocks[entry.made].last].append(entry.forward.with_op(Op.OFFLOAD))
            front[plan.blocks[entry.used - beside].first].append(entry.forward.with_op(Op.RELOAD))
        orders.append(woven(order, front, behind))
    return replace(program, orders=tuple(orders))


def least_held(program: Program, *, beside: int = 1) -> tuple[float, ...]:
    """For each rank, the lowest cap that `insert_offload` can keep, in activations of one stage and micro-batch."""
    sizes = (1.0,) * program.schedule.num_stages
    return tuple(_Plan(blocks_of(order, program), program, sizes, beside).least() for order in program.orders)


class _Plan:
    """One rank's activations: which are held, and which can be offloaded, during each block."""

    def __init__(self, blocks: Sequence[ComputeBlock], program: Program, sizes: Sequence[float], beside: int) -> None:
        self.blocks = blocks
        self.sizes = sizes
        self.entries: list[_Activation] = []
        split = program.schedule.split_backwards
        made: dict[tuple[int, int | None, int | None], tuple[int, Action]] = {}
        used: dict[tuple[int, int | None, int | None], int] = {}
        for index, block in enumerate(blocks):
            for action in block.computations:
                key = (action.stage, action.microbatch, action.slice)
                if action.op is Op.F:
                    made[key] = (index, action)
                    continue
                first = used.setdefault(key, index)
                if action.op is Op.W or (action.op is Op.B and key not in split):
                    at, forward = made[key]
                    self.entries.append(_Activation(forward, at, at + 1 + beside, first - beside, first, index))

    def moves(self, cap: float) -> list[_Activation] | None:
        """The activations to offload to keep `cap`, the fewest if sizes are equal; None if the cap is too low."""
        leave: defaultdict[int, list[_Activation]] = defaultdict(list)
        change = [0.0] * (len(self.blocks) + 1)
        for entry in self.entries:
            change[entry.made] += self.sizes[entry.forward.stage]
            change[entry.freed + 1] -= self.sizes[entry.forward.stage]
            if entry.leaves < entry.returns:
                leave[entry.leaves].append(entry)
        held = 0.0
        away: list[tuple[int, _Activation]] = []  # candidates, the last to return first
        found: list[_Activation] = []
        for now in range(len(self.blocks)):
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
        """The lowest possible cap: the peak with all possible activations offloaded."""
        change = [0.0] * (len(self.blocks) + 1)
        for entry in self.entries:
            size = self.sizes[entry.forward.stage]
            change[entry.made] += size
            change[entry.freed + 1] -= size
            if entry.leaves < entry.returns:
                change[entry.leaves] -= size
                change[entry.returns] += size
        return max(0.0, *accumulate(change))
