"""Lower bounds on the makespan of a step; the highest of three is used.

If every stage has one rank, micro-batches are interchangeable, so each op of a stage can run them in order. The memory
caps then imply additional precedences between actions.

* Chains: the longest path through the dependencies and these precedences.
* Ranks: Jackson's preemptive schedule of each rank's actions, with heads and tails from the chains.
* Memory: while a micro-batch runs on other ranks, its activations stay here. At any moment a rank runs one action and
  holds a set of waiting micro-batches that fits into the remaining memory. A linear program over these sets gives the
  least time in which every action runs and every micro-batch is away for its minimum time.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from pipeloom.ir.action import Action, Op
from pipeloom.schedules.search.operations import Work

_MOST_SETS = 20_000  # of waiting micro-batches, for one rank; the bound is left out where there are more
_F, _I, _W = Op.F, Op.I, Op.W


def lower_bound(work: Work) -> float:
    """Seconds: no order that keeps the caps is shorter."""
    if not work.actions:
        return 0.0
    heads, tails = heads_and_tails(work)
    bound = max(h + s + t for h, s, t in zip(heads, work.seconds, tails, strict=True))
    for rank in range(work.placement.num_ranks):
        numbers = [n for n, where in enumerate(work.rank) if where == rank]
        bound = max(bound, _preemptive([(heads[n], tails[n], work.seconds[n]) for n in numbers]))
        if not work.replicated and math.isfinite(work.caps[rank]):
            bound = max(bound, _memory_bound(work, rank, heads, tails))
    return bound


def heads_and_tails(work: Work) -> tuple[list[float], list[float]]:
    """For each action the least seconds before its start, and between its end and the end of the step."""
    seconds, needs = work.seconds, earlier(work)
    heads: list[float] = []
    for each in needs:
        heads.append(max((heads[need] + seconds[need] + lag for need, lag in each), default=0.0))
    tails = [0.0] * len(needs)
    for n in reversed(range(len(needs))):
        for need, lag in needs[n]:
            tails[need] = max(tails[need], tails[n] + seconds[n] + lag)
    return heads, tails


def earlier(work: Work) -> list[list[tuple[int, float]]]:
    """For each action, the actions that end before it starts, with the seconds between; all have lower numbers."""
    number, m = work.number, work.num_microbatches
    found: list[list[tuple[int, float]]] = []
    for n, (stage, op, b, _) in enumerate(work.actions):
        needs = [(work.before[n], work.lag[n])] if work.before[n] >= 0 else []
        if op is not _F:
            needs.append((number[Action(stage, _F if op is _I else _I, b)], 0.0))
        if b and not work.replicated:
            needs.append((number[Action(stage, op, b - 1)], 0.0))
        found.append(needs)
    if not work.replicated:
        for rank, stages in enumerate(work.placement.stages_of):
            for stage, (other, op), distance in _forced(work, rank, stages):
                for b in range(distance, m):
                    found[number[Action(stage, _F, b)]].append((number[Action(other, op, b - distance)], 0.0))
    return found


def _forced(work: Work, rank: int, stages: Sequence[int]) -> Iterator[tuple[int, tuple[int, Op], int]]:
    """``(stage, (other, op), d)``: F of micro-batch b on `stage` comes only after `op` of b - d on `other`.

    Let A(j) be the memory of a micro-batch on this rank after the forwards of the rank's first j stages.
    """
    activation, cap = work.conditions.activation, work.caps[rank]
    held = [0.0]
    for stage in stages:
        held.append(held[-1] + activation[stage])
    for j, stage in enumerate(stages):
        # All from the oldest that I of stage i has not released are here with A(i), the newest with A(j).
        for i, other in enumerate(stages[: j + 1]):
            if (rest := held[i + 1]) > 0.0 and math.isfinite(cap):
                yield stage, (other, _I), int((cap - held[j + 1] + held[i + 1]) / rest)
        # Before the oldest that waits for stage i can go on to it, the younger ones stay, with A(j) at least.
        for i in range(j + 1, len(stages)):
            if (rest := held[j + 1]) > 0.0 and math.isfinite(cap):
                yield stage, (stages[i], _F), int((cap - held[i + 1]) / rest) + 1


def _memory_bound(work: Work, rank: int, heads: list[float], tails: list[float]) -> float:
    """The third bound, with and without W: the tail of the last I is longer than the tail of the last W."""
    stages, m, cap = work.placement.stages_of[rank], work.num_microbatches, work.caps[rank]
    conditions, number = work.conditions, work.number
    held = [sum(conditions.activation[s] for s in stages[: j + 1]) for j in range(len(stages))]
    if cap >= m * held[-1] or min(held) == 0.0:
        return 0.0
    sets = list(itertools.islice(_sets(held, cap, m), _MOST_SETS + 1))
    if len(sets) > _MOST_SETS:
        return 0.0
    down, up = away(work, stages)
    times = [a + b for a, b in zip([*down, 0.0], up, strict=True)]
    first = min(heads[number[Action(s, _F, 0)]] for s in stages)
    last = min(tails[number[Action(s, _I, m - 1)]] for s in stages)
    backward = [
        (seconds, held[j], 1)
        for j, s in enumerate(stages)
        for seconds in (conditions.forward[s], conditions.backward_input[s])
    ]
    weights = [(conditions.backward_weight[s], conditions.weight_gradient[s], 0) for s in stages]
    return first + max(
        _covering(backward, sets, held, times, cap, m) + last, _covering(backward + weights, sets, held, times, cap, m)
    )


def away(work: Work, stages: Sequence[int]) -> tuple[list[float], list[float]]:
    """The least seconds that a micro-batch is on other ranks between a rank's actions on it.

    Returns:
        down: between F of consecutive stages of the rank. up: for each stage, between I of the rank's next stage (for
        the last stage, its own F) and its I.
    """
    ends: dict[Action, float] = {}
    clock = 0.0
    for n in range(3 * work.placement.num_stages):  # micro-batch 0 alone, W left out
        if work.actions[n].op is not _W:
            clock += work.lag[n] + work.seconds[n]
            ends[work.actions[n]] = clock

    def between(first: Action, then: Action) -> float:
        return ends[then] - work.seconds[work.number[then]] - ends[first]

    forwards, backwards = ([Action(s, op, 0) for s in stages] for op in (_F, _I))
    down = [between(a, b) for a, b in itertools.pairwise(forwards)]
    up = [between(b, a) for a, b in itertools.pairwise(backwards)]
    return down, [*up, between(forwards[-1], backwards[-1])]


def _sets(held: Sequence[float], room: float, most: int) -> Iterator[tuple[int, ...]]:
    """All ``(count with held[0], count with held[1], ...)`` that fit, the last count as high as possible."""
    highest = min(most, int(room / held[0]))
    if len(held) == 1:
        yield (highest,)
        return
    for count in range(highest + 1):
        for more in _sets(held[1:], room - count * held[0], most - count):
            yield (count, *more)


def _covering(
    running: Sequence[tuple[float, float, int]],
    sets: Sequence[tuple[int, ...]],
    held: Sequence[float],
    away: Sequence[float],
    cap: float,
    m: int,
) -> float:
    """The least time in which all of `running` ``(seconds, bytes, micro-batches)`` and `away` come m times."""
    import numpy as np
    from scipy.optimize import linprog

    choices = [*running, (0.0, 0.0, 0)]  # or nothing runs
    columns = []
    for number, (_, size, own) in enumerate(choices):
        fitting = {counts[:-1]: counts for counts in sets}
        for fewer in fitting:
            used = sum(count * each for count, each in zip(fewer, held, strict=False))
            count = min(int((cap - size - used) / held[-1]), m - own - sum(fewer))
            if size + used <= cap and count >= 0:
                runs = [float(number == other) for other in range(len(running))]
                columns.append([*runs, *map(float, fewer), float(count)])
    needed = np.array([m * seconds for seconds, _, _ in running] + [m * seconds for seconds in away])
    unit = float(needed.max()) or 1.0
    found = linprog(np.ones(len(columns)), A_ub=-np.array(columns).T, b_ub=-needed / unit, method="highs")
    return float(found.fun) * unit * (1 - 1e-9) if found.status == 0 else 0.0


def _preemptive(jobs: Sequence[tuple[float, float, float]]) -> float:
    """Of (head, tail, seconds): the makespan of one machine that always runs the ready job with the longest tail."""
    coming = sorted(jobs)
    ready: list[list[float]] = []  # [-tail, seconds left]
    now = makespan = 0.0
    index = 0
    while index < len(coming) or ready:
        if not ready:
            now = max(now, coming[index][0])
        while index < len(coming) and coming[index][0] <= now:
            heapq.heappush(ready, [-coming[index][1], coming[index][2]])
            index += 1
        job = ready[0]
        until = coming[index][0] if index < len(coming) else math.inf
        if now + job[1] <= until:
            now += job[1]
            makespan = max(makespan, now - job[0])
            heapq.heappop(ready)
        else:
            job[1] -= until - now
            now = until
    return makespan
