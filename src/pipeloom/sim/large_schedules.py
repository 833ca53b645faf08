"""Times of a large schedule, computed for all actions of one round of its proof at once.

An action starts when the action before it on its rank has ended and its message has arrived, so two look-ups, a maximum
and a sum time a round. Where rounds are narrow, the same is done action by action.
"""

from itertools import pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeloom.ir.large.columns import B, F, I, Ints, Proof, W
from pipeloom.ir.order import OPS
from pipeloom.ir.schedule import Schedule
from pipeloom.sim.costs import Costs
from pipeloom.sim.network import Network
from pipeloom.sim.spans import Curve, SpanRow

Floats = npt.NDArray[np.float64]
Times = tuple[Floats, Floats]
# What actions wait for from other ranks, and how long that travels (None: no time).
Waits = list[tuple[Ints, Floats | None]]
_WIDE = 24  # actions per round from which rounds are faster
_FREE, _THERE = 0, 1  # numbers of no action: one that ends when the step begins, and one whose result is always there


def spans_by_rounds(schedule: Schedule, proof: Proof, costs: Costs, network: Network) -> tuple[SpanRow, ...]:
    """For each rank its spans, each action as early as possible; messages take only their latency."""
    columns = proof.columns
    table = costs.seconds(schedule)
    seconds = np.array([table[op] for op in OPS])[columns.op, columns.stage]
    slowness = costs.slowness(schedule)
    if slowness is not None:
        seconds *= np.array(slowness)[columns.rank]
    later = None  # from an action's end until its result is there for other ranks
    if len(columns.units):
        partners = columns.units + 1
        seconds[columns.units] *= costs.overlap
        seconds[partners] *= costs.overlap
        later = np.zeros(len(seconds))
        later[columns.units] = seconds[partners]
    latency = np.array(network.latency(schedule.num_ranks))
    rank = np.append(columns.rank, np.int32(0))
    remotes = [remote for remote in (proof.remote, proof.remote_of_partner) if remote is not None]
    waits: Waits = [(remote, latency[rank[remote], rank[:-1]] if latency.any() else None) for remote in remotes]
    starts, ends = _times(proof, seconds, waits, later)
    return tuple(
        SpanRow(order, starts[a:b], ends[a:b])
        for order, a, b in zip(schedule.orders, columns.first[:-1], columns.first[1:], strict=True)
    )


def _times(proof: Proof, seconds: Floats, waits: Waits, later: Floats | None) -> Times:
    """Starts and ends by index. Within, actions are numbered by `Proof.sequence`, so a round is a slice."""
    sequence, count, begins = proof.sequence, len(proof.sequence), proof.columns.first
    number = np.empty(count + 1, np.int32)
    number[sequence] = np.arange(2, count + 2, dtype=np.int32)
    number[count] = _THERE
    before = number[sequence - 1]
    before[number[begins[:-1][np.diff(begins) > 0]] - 2] = _FREE
    waits = [(number[remote[sequence]], None if lags is None else lags[sequence]) for remote, lags in waits]
    seconds, later = seconds[sequence], None if later is None else later[sequence]
    rounds = proof.rounds
    if rounds and count >= _WIDE * len(rounds):
        starts, ends = _by_rounds(rounds, before, seconds, waits, later)
    elif len(waits) == 1 and later is None:
        starts, ends = _singly(before, seconds, *waits[0])
    else:
        starts, ends = _singly_of_units(before, seconds, waits, later)
    number = number[:count] - 2
    return starts[number], ends[number]


def _by_rounds(rounds: tuple[int, ...], before: Ints, seconds: Floats, waits: Waits, later: Floats | None) -> Times:
    starts, ends = np.empty(len(seconds)), np.empty(len(seconds) + 2)
    ends[:2] = 0.0, -np.inf
    there = ends if later is None else ends.copy()
    arrived = np.empty(max(map(int, np.diff(rounds)), default=0))
    for first, last in pairwise(rounds):  # `out` and `clip` save a copy each
        start = starts[first:last]
        ends.take(before[first:last], out=start, mode="clip")
        for sources, lags in waits:
            come = arrived[: last - first]
            there.take(sources[first:last], out=come, mode="clip")
            if lags is not None:
                come += lags[first:last]
            np.maximum(start, come, out=start)
        end = np.add(start, seconds[first:last], out=ends[first + 2 : last + 2])
        if later is not None:
            np.add(end, later[first:last], out=there[first + 2 : last + 2])
    return starts, ends[2:]


def _singly(before: Ints, seconds: Floats, sources: Ints, lags: Floats | None) -> Times:
    """Action by action; starts follow from all ends at once."""
    found = [0.0, -np.inf]
    append = found.append
    if lags is None:
        for last, source, duration in zip(before.tolist(), sources.tolist(), seconds.tolist(), strict=True):
            start, come = found[last], found[source]
            append((come if come > start else start) + duration)
    else:
        columns = before.tolist(), sources.tolist(), lags.tolist(), seconds.tolist()
        for last, source, lag, duration in zip(*columns, strict=True):
            start, come = found[last], found[source] + lag
            append((come if come > start else start) + duration)
    ends = np.array(found)
    return np.maximum(ends[before], ends[sources] if lags is None else ends[sources] + lags), ends[2:]


def _singly_of_units(before: Ints, seconds: Floats, waits: Waits, later: Floats | None) -> Times:
    """The same with overlapped units, whose actions may wait twice and whose results may be there later."""
    starts, ends, there = list[float](), [0.0, -np.inf], [0.0, -np.inf]
    columns = [
        zip(sources.tolist(), repeat(0.0) if lags is None else lags.tolist(), strict=False) for sources, lags in waits
    ]
    after = repeat(0.0) if later is None else later.tolist()
    for last, duration, behind, *needs in zip(before.tolist(), seconds.tolist(), after, *columns, strict=False):
        start = ends[last]
        for source, lag in needs:
            start = max(start, there[source] + lag)
        starts.append(start)
        ends.append(start + duration)
        there.append(start + duration + behind)
    return np.array(starts), np.array(ends[2:])


def live_curves(schedule: Schedule, proof: Proof, rows: tuple[SpanRow, ...]) -> tuple[Curve, ...]:
    """Change points of each rank's live activations: up at the start of F, down at the end of B or W."""
    share = schedule.stage_share / schedule.num_slices
    curves = []
    for op, row in zip(_by_rank(proof, proof.columns.op), rows, strict=True):
        change = (op == F).astype(np.int8) - ((op == B) | (op == W))
        at = np.flatnonzero(change)
        times = np.where(change[at] > 0, row.starts[at], row.ends[at])
        values = np.cumsum(change[at]) * share
        if schedule.forward_only:
            times, values = np.stack((row.starts, row.ends), axis=1).ravel(), np.tile((share, 0.0), len(row))
        curves.append(Curve(times, values))
    return tuple(curves)


def byte_curves(
    schedule: Schedule, proof: Proof, rows: tuple[SpanRow, ...], activation: tuple[float, ...], left: tuple[float, ...]
) -> tuple[Curve, ...]:
    """Change points of each rank's bytes: F takes all at its start, I gives all but `left` back, W or B the rest."""
    whole, part = np.array(activation), np.array(left)
    curves = []
    columns = (_by_rank(proof, proof.columns.op), _by_rank(proof, proof.columns.stage), rows)
    for op, stage, row in zip(*columns, strict=True):
        change = np.select(
            [op == F, op == B, op == I], [whole[stage], -whole[stage], -(whole[stage] - part[stage])], -part[stage]
        )
        at = np.flatnonzero((op == F) | (change != 0))
        times, changes = np.where(op[at] == F, row.starts[at], row.ends[at]), change[at]
        if schedule.forward_only:
            moved = np.stack((np.ones(len(row), bool), change != 0), axis=1).ravel()
            times = np.stack((row.starts, row.ends), axis=1).ravel()[moved]
            changes = np.stack((change, -change), axis=1).ravel()[moved]
        curves.append(Curve(times, np.cumsum(changes)))
    return tuple(curves)


def _by_rank(proof: Proof, column: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return np.split(column, proof.columns.first[1:-1])
