"""Offloaded activations: a lower bound of the time that transfers take, and host memory. No torch here.

A rank keeps at most N activations. During a computation with n > N of them, n - N at least are elsewhere, and none is
elsewhere for longer than the longest time between a forward and its backward. So a step has at least

    moves >= sum over computations of max(0, n - N) / most computations for which one activation is elsewhere
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import ceil, inf
from typing import NamedTuple

from pipeloom.ir import Action, Op, Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.search.short_steps import schedule_of, short_microbatches

_BESIDE = 1  # computations with which a transfer overlaps: the activation is held meanwhile


class Held(NamedTuple):
    """The activations of a rank.

    Attributes:
        counts: number of computations by number of activations that are live during them.
        longest: most computations for which one activation can be elsewhere.
        least: that a rank holds at once, with all elsewhere that can be: the lowest cap.
    """

    counts: Counter[int]
    longest: int
    least: int


class Offloaded(NamedTuple):
    """What a configuration offloads, of the rank for which it is most.

    Attributes:
        seconds: for which activations keep its link to the host busy, at least.
        host_bytes: in host memory at once.
    """

    seconds: float
    host_bytes: float


def offloaded_of(costs: StepCosts, of: Configuration, stages_of: Sequence[Sequence[int]]) -> Offloaded:
    """What leaves the ranks in a step.

    Args:
        costs: of the model on its cluster.
        of: the configuration, with offload of activations or states.
        stages_of: the stages of each rank.
    """
    states = 0.0
    if of.offload_states:
        shards = of.replicas if of.strategy.shards_optimizer else 1
        states = costs.state_bytes(of, max(costs.held_parameters(of, held) for held in stages_of) / shards)
    if of.offload is None:
        return Offloaded(0.0, states)
    rate = costs.network(of).memory_bytes_per_second or inf
    kept, seconds, there = [size / of.slices for size in costs.kept_bytes(of)], 0.0, 0.0
    for held, (moves, away) in zip(stages_of, least_moves(of, of.offload), strict=True):
        seconds = max(seconds, 2 * moves * min(kept[stage] for stage in held) / rate)
        there = max(there, away * sum(kept[stage] for stage in held) / len(held))
    return Offloaded(seconds, states + there)


def lowest_cap(of: Configuration) -> int:
    """The least activations that every rank can keep to."""
    number, _ = short_microbatches(of, of.stages)
    return max(rank.least for rank in _held(of.schedule, of.pipeline, number, of.chunks, of.slices))


def most_live(of: Configuration) -> int:
    """Activations that the fullest rank holds at once without offload, in a short step."""
    number, _ = short_microbatches(of, of.stages)
    return max(max(rank.counts) for rank in _held(of.schedule, of.pipeline, number, of.chunks, of.slices))


def least_moves(of: Configuration, most_kept: int) -> list[tuple[int, int]]:
    """For each rank, activations that leave in a step, at least, and most that are elsewhere at once.

    Ranks that cannot keep to the cap count with the least that they can.
    """
    number, group = short_microbatches(of, of.stages)
    found = _held(of.schedule, of.pipeline, number, of.chunks, of.slices)
    times = (of.microbatches - number) // group
    less = _held(of.schedule, of.pipeline, number - group, of.chunks, of.slices) if times else found
    moves: list[tuple[int, int]] = []
    for rank, before in zip(found, less, strict=True):
        cap = max(most_kept, rank.least)
        most, fewer = max(rank.counts), max(before.counts)
        away = max(0, most + times * max(0, most - fewer) - cap)
        excess, shorter = (sum(max(0, n - cap) * count for n, count in each.counts.items()) for each in (rank, before))
        excess += times * max(0, excess - shorter)
        moves.append((ceil(excess / rank.longest) if excess else 0, away))
    return moves


@lru_cache(maxsize=512)
def _held(name: str, ranks: int, microbatches: int, chunks: int, slices: int) -> list[Held]:
    schedule = schedule_of(name, ranks, microbatches, chunks, slices)
    partners = schedule.partners
    return [_of_rank(order, schedule, partners) for order in schedule.orders]


def _of_rank(order: Sequence[Action], schedule: Schedule, partners: Mapping[Action, Action]) -> Held:
    made: dict[tuple[int, int | None, int | None], int] = {}
    used: dict[tuple[int, int | None, int | None], int] = {}
    change = [0] * (len(order) + 1)  # of live activations, by computation; those of an overlapped pair count as one
    least = [0] * (len(order) + 1)  # the same with all away that can be
    now = longest = 0
    second = False
    for action in order:
        stage, op, microbatch, piece = action
        key = stage, microbatch, piece
        if op is Op.F:
            made[key] = now
        elif key not in used:
            used[key] = now
        if op is Op.W or (op is Op.B and key not in schedule.split_backwards):
            start, back = made[key], used[key]
            for row in (change, least):
                row[start] += 1
                row[now + 1] -= 1
            leaves, returns = start + 1 + _BESIDE, back - _BESIDE
            if leaves < returns:
                least[leaves] -= 1
                least[returns] += 1
                longest = max(longest, returns - leaves)
        second = not second and action in partners
        now += not second
    return Held(Counter(list(accumulate(change))[:now]), longest, max(accumulate(least)))
