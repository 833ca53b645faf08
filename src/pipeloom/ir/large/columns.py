"""A large schedule as columns of integers, proved legal by whole columns at once.

`needs` states the relation of `dependencies` for all actions together; tests hold the two against each other, over all
families and over random schedules. All needs of an action but one are on its own rank, where the order alone decides.
So every action waits for the one before it on its rank and for at most one other, its `remote`; `rounds` walks those.

The columns tell whether a schedule is legal. Why a schedule is illegal, `check` finds rule by rule.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Op
from pipeloom.ir.check.input_types import has_actions
from pipeloom.ir.large.rounds import walk_columns
from pipeloom.ir.order import (
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    OP_NUMBER,
    OP_SHIFT,
    SLICE_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    Order,
    encode,
)
from pipeloom.ir.schedule import Schedule, once_per_schedule

Ints = npt.NDArray[np.int32]
Needs = Iterator[tuple[Ints, Ints]]

F, B, I, W = (OP_NUMBER[op] for op in (Op.F, Op.B, Op.I, Op.W))  # noqa: E741


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Every action of a schedule, rank after rank; an index counts through all ranks.

    Attributes:
        codes: as in `Order`.
        op: number of the op, see `OPS`.
        stage, microbatch, rank: of each action.
        first: for each rank, the index of its first action; one more entry ends the last rank.
        units: the index of each F that starts an overlapped unit; its partner is the next action.
    """

    codes: npt.NDArray[np.int64]
    op: npt.NDArray[np.int8]
    stage: Ints
    microbatch: Ints
    rank: Ints
    first: Ints
    units: Ints

    @property
    def piece(self) -> Ints:
        """The slice, -1 where there is none."""
        return ((self.codes & SLICE_MASK) - 1).astype(np.int32)

    def places(self, rank: int, stage: int, *ops: Op) -> Iterator[tuple[int, int]]:
        """Where `rank` runs one of `ops` of `stage`: positions in its order, and the micro-batches."""
        here = slice(self.first[rank], self.first[rank + 1])
        at = np.flatnonzero(np.isin(self.op[here], [OP_NUMBER[op] for op in ops]) & (self.stage[here] == stage))
        return zip(at.tolist(), self.microbatch[here][at].tolist(), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """That a schedule is legal, and what its timing needs.

    Attributes:
        columns: of the schedule.
        remote: for each action, the index of the action on another rank that it waits for; their number for none.
        remote_of_partner: likewise for the second member of the unit that an action starts; None without units.
        sequence: all indices in an order that respects all dependencies.
        rounds: where in `sequence` each round begins, and its end; None where it was walked action by action.
        live: for each rank, the peak number of live activations.
    """

    columns: Columns
    remote: Ints
    remote_of_partner: Ints | None
    sequence: Ints
    rounds: tuple[int, ...] | None
    live: tuple[int, ...]


def columns_of(schedule: Schedule) -> Columns | None:
    """The columns; None if an entry is not an action, a number is too large, or an overlapped pair is invalid."""
    if not all(map(has_actions, schedule.orders)):
        return None
    try:
        parts = [
            np.frombuffer(o.codes, np.int64) if isinstance(o, Order) else np.array([*map(encode, o)], np.int64)
            for o in schedule.orders
        ]
        pairs = np.array([[encode(first), encode(second)] for first, second in schedule.overlapped], np.int64)
    except ScheduleError:
        return None
    codes = np.concatenate(parts)
    first = np.zeros(len(parts) + 1, np.int32)
    np.cumsum([len(part) for part in parts], out=first[1:])
    columns = Columns(
        codes=codes,
        op=(codes >> OP_SHIFT).astype(np.int8),
        stage=(codes >> STAGE_SHIFT & STAGE_MASK).astype(np.int32),
        microbatch=((codes >> MICROBATCH_SHIFT & MICROBATCH_MASK) - 1).astype(np.int32),
        rank=np.repeat(np.arange(len(parts), dtype=np.int32), np.diff(first)),
        first=first,
        units=np.empty(0, np.int32),
    )
    if not len(pairs):
        return columns
    units = _units(columns, pairs)
    return None if units is None else replace(columns, units=units)


def _units(columns: Columns, pairs: npt.NDArray[np.int64]) -> Ints | None:
    """The indices of the first members; None unless each is an F with its own B or I directly behind it."""
    codes, last = columns.codes, len(columns.codes) - 1
    found = np.flatnonzero(np.isin(codes, pairs[:, 0]))
    if len(found) != len(pairs) or len(np.unique(pairs)) != pairs.size or found[-1] == last:
        return None
    pairs = pairs[np.argsort(pairs[:, 0])]
    units = found[np.argsort(codes[found])]
    after = columns.op[units + 1]
    legal = (columns.op[units] == F) & ((after == B) | (after == I)) & (columns.rank[units] == columns.rank[units + 1])
    if not (legal.all() and (codes[units] == pairs[:, 0]).all() and (codes[units + 1] == pairs[:, 1]).all()):
        return None
    return np.sort(units).astype(np.int32)


@once_per_schedule
def prove(schedule: Schedule) -> Proof | None:
    """The proof that a schedule is legal; None if it is not, or has no columns."""
    if min(schedule.num_microbatches, schedule.num_slices) < 1 or len(schedule.orders) != schedule.num_ranks:
        return None
    columns = columns_of(schedule)
    if columns is None or not _fits(schedule, columns):
        return None
    places = _places(schedule, columns)
    if places is None:
        return None
    remote = _remote(schedule, columns, *places)
    if remote is None:
        return None
    partner = None
    if len(columns.units):  # the F waits for the needs of both members
        partner = np.full_like(remote, len(columns.codes))
        partner[columns.units] = remote[columns.units + 1]
        remote[columns.units + 1] = len(columns.codes)
    walked = walk_columns(columns.first, remote, partner)
    if walked is None:
        return None
    live, (sequence, rounds) = _live(schedule, columns), walked
    return Proof(columns=columns, remote=remote, remote_of_partner=partner, sequence=sequence, rounds=rounds, live=live)


def _fits(schedule: Schedule, columns: Columns) -> bool:
    """Whether every action has a legal op, stage, micro-batch and slice and stands on a rank that holds its stage."""
    codes, stage, microbatch, num_slices = columns.codes, columns.stage, columns.microbatch, schedule.num_slices
    number = codes & SLICE_MASK  # 0 for none, from 1 on
    legal_slice = number == 0 if num_slices == 1 else (number > 0) & (number <= num_slices)
    legal_op = (columns.op >= min(F, B, I, W)) & (columns.op <= max(F, B, I, W))
    legal = legal_op & legal_slice & (stage < schedule.num_stages)
    legal &= (microbatch >= 0) & (microbatch < schedule.num_microbatches)
    if not len(codes) or not legal.all():
        return False
    replicas = schedule.placement.replicas
    counts = np.array([*map(len, replicas)], np.int32)
    most = int(counts.max())
    table = np.array([(*ranks, *(-1,) * (most - len(ranks))) for ranks in replicas], np.int32)
    holder = table[:, 0][stage] if most == 1 else table[stage, microbatch % counts[stage]]
    return bool((holder == columns.rank).all())


def _places(schedule: Schedule, columns: Columns) -> tuple[Ints, Ints, Ints] | None:
    """Where F, the backward and W of each (stage, micro-batch, slice) stand; None if one is missing or twice.

    Returns:
        For each (stage, micro-batch, slice) in this order the index of its F, of its B or I, and of its W (-1 where
        there is none).
    """
    m, k = schedule.num_microbatches, schedule.num_slices
    count = schedule.num_stages * m * k
    if count > len(columns.codes):
        return None
    op = columns.op
    cell = columns.stage * m + columns.microbatch
    if k > 1:
        cell = cell * k + columns.piece
    tables = []
    for chosen in (op == F, (op == B) | (op == I), op == W):
        at = np.full(count, -1, np.int32)
        indices = np.flatnonzero(chosen)
        at[cell[indices]] = indices
        if len(indices) != np.count_nonzero(at >= 0):
            return None
        tables.append(at)
    forward, backward, weight = tables
    split = np.zeros(count, bool)
    split[cell[op == I]] = True
    backwards_due = (backward >= 0) == (not schedule.forward_only)
    if not ((forward >= 0).all() and backwards_due.all() and ((weight >= 0) == split).all()):
        return None
    return forward, backward, weight


def needs(schedule: Schedule, forward: Ints, backward: Ints, weight: Ints) -> Needs:
    """Pairs of columns: actions, and for each of them one that it needs. The relation of `dependencies`."""
    shape = (schedule.num_stages, schedule.num_microbatches, schedule.num_slices)
    forwards, backwards = forward.reshape(shape), backward.reshape(shape)
    yield _pairs(forwards[1:], forwards[:-1])
    if shape[2] > 1:
        yield _pairs(forwards[..., 1:], forwards[..., :-1])
    if schedule.forward_only:
        return
    yield backward, forward
    yield _pairs(backwards[:-1], backwards[1:])
    if shape[2] > 1:
        yield _pairs(backwards[..., :-1], backwards[..., 1:])
    split = weight >= 0
    yield weight[split], backward[split]


def _pairs(users: Ints, needed: Ints) -> tuple[Ints, Ints]:
    return users.reshape(-1), needed.reshape(-1)


def _remote(schedule: Schedule, columns: Columns, forward: Ints, backward: Ints, weight: Ints) -> Ints | None:
    """`Proof.remote`; None if an action stands before one of its own rank that it needs."""
    count = len(columns.codes)
    remote = np.full(count, count, np.int32)
    begins = np.arange(count, dtype=np.int32)  # where what an action needs has to stand before: its unit begins there
    begins[columns.units + 1] -= 1
    for users, needed in needs(schedule, forward, backward, weight):
        elsewhere = columns.rank[users] != columns.rank[needed]
        if not (elsewhere | (needed < begins[users])).all():
            return None
        remote[users[elsewhere]] = needed[elsewhere]
    return remote


def _live(schedule: Schedule, columns: Columns) -> tuple[int, ...]:
    op = columns.op
    bounds = list(zip(columns.first[:-1].tolist(), columns.first[1:].tolist(), strict=True))
    if schedule.forward_only:
        return tuple(int(end > first) for first, end in bounds)
    # Every rank ends with none alive, so one sum can run through all of them.
    alive = np.cumsum((op == F).astype(np.int8) - ((op == B) | (op == W)), dtype=np.int32)
    return tuple(int(alive[first:end].max()) if end > first else 0 for first, end in bounds)
