"""Chimera and Hanayo: several orders are merged into one per rank, greedily in time.

Chimera (Li and Hoefler, arXiv:2107.06925): two 1F1B pipelines in opposite directions fill each other's bubbles.

Every stage is on two ranks; even micro-batches go down the ranks, odd ones up. Each direction is a 1F1B of its own. A
rank merges its two orders: whenever it is free it runs what is ready, backwards first.

    p=4, m=4
    rank 0  0F0 0F2 ... 3F1 3B1 3F3 3B3 0B0 ... 0B2
    rank 1  ... 1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 ...
    rank 2  ... 1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 ...
    rank 3  0F1 0F3 ... 3F0 3B0 3F2 3B2 0B1 ... 0B3

For even m >= p the makespan has ``(p-2) * tB`` of bubble at tB = tF and at tB = 2*tF. With m = p rank d holds
``p/2 + 1 + min(d, p-1-d)`` activations, never more than p; weights are held twice.

Hanayo (Liu et al., arXiv:2308.15762): W waves go down and up the ranks, each stage held once.

A rank holds 2W chunks: the stages zig-zag through the ranks, so a micro-batch turns round at the ends without a
message. Whenever a rank is free it runs what is ready. Backwards first and deepest forwards first are tried, with
several numbers of in-flight micro-batches; the shortest order within 1F1B's memory of p rank-shares is used.

    p=2, m=2, one wave
    rank 0  0F0 0F1 ... 3F0 3B0 3F1 3B1 0B0 ... 0B1
    rank 1  ... 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 ...

The paper gives an idle fraction of ``(2p-2) / (3*p*W + p - 1)`` for m = p and tB = 2*tF; ours is never above it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule, dependencies, live_activations
from pipeloom.ir.placement import even_near
from pipeloom.schedules.phases import Phases
from pipeloom.schedules.table import family


@family(
    "chimera",
    paper="Chimera, arXiv:2107.06925",
    constraints="every stage twice; p even; bubble and peak for m = p, bubble for even m >= p",
    bubble="(2*p-4)/(3*m+2*p-4)",
    peak="p/2 + 1 + min(d, p-1-d)",
    chunks=2,
    most_actions=1_000_000,
)
def chimera(*, num_ranks: int, num_microbatches: int) -> Schedule:
    """Bidirectional 1F1B: stage s on ranks s and p-1-s.

    Raises:
        ScheduleError: an odd number of ranks.
    """
    p, m = num_ranks, num_microbatches
    if p % 2:
        raise ScheduleError(f"num_ranks={p}: schedule 'chimera' needs an even number of ranks. Use {even_near(p)}.")
    streams = [
        [Phases(first=b, stride=2).alternate(s, m, p - 1 - s).order() for b, s in enumerate((d, p - 1 - d))]
        for d in range(p)
    ]
    weaver = Weaver("chimera", Placement.bidirectional(p), m, streams, units={Op.F: 1, Op.B: 1})
    return weaver.weave(lambda action: (action.op is not Op.B, action.microbatch))[0]


@family(
    "hanayo",
    paper="Hanayo, arXiv:2308.15762",
    constraints="v even; bubble for m = p",
    bubble="<= (2*p-2)/(3*p*v/2+p-1)",
    peak="<= p",
    chunks=None,
    most_actions=1_000_000,
)
def hanayo(*, num_ranks: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    """Waves over a zig-zag placement; two chunks make one wave.

    Raises:
        ScheduleError: an odd number of chunks.
    """
    p, m, v = num_ranks, num_microbatches, num_chunks
    if v % 2:
        raise ScheduleError(
            f"num_chunks={v}: schedule 'hanayo' needs an even number of chunks, two per wave. Use {v + 1}."
        )
    placement = Placement.v(p, v)
    streams = [
        [[Action(s, op, b) for b in range(m)] for s in stages for op in (Op.F, Op.B)] for stages in placement.stages_of
    ]
    weaver = Weaver("hanayo", placement, m, streams, units={Op.F: 1, Op.B: 2})
    candidates: list[tuple[int, int, Schedule]] = []
    for first in (Op.B, Op.F):
        for in_flight in sorted({p, p + p // 2, 2 * p}):
            schedule, makespan = weaver.weave(
                lambda action, first=first: (  # type: ignore[misc]
                    action.op is not first,
                    -action.stage if action.op is Op.F else action.stage,
                ),
                # A micro-batch enters when the one so many before it has left.
                also_needs={Action(0, Op.F, b): Action(0, Op.B, b - in_flight) for b in range(in_flight, m)},
            )
            candidates.append((makespan, len(candidates), schedule))
    return next(made for _, _, made in sorted(candidates) if max(live_activations(made)) <= p * v)


Streams = Sequence[Sequence[Sequence[Action]]]


class Weaver:
    """Streams of actions with their dependencies; `weave` merges them into schedules.

    Actions are numbered stream by stream over all ranks. An action is offered to its rank once it is the head of its
    stream and its dependencies have ended.

    Args:
        name: the name of the schedules.
        placement: which ranks hold which stage.
        num_microbatches: micro-batches per step.
        streams: for each rank, orders that stay as they are; together they are all its actions.
        units: time of each op on one stage, at least 1.
    """

    def __init__(
        self, name: str, placement: Placement, num_microbatches: int, streams: Streams, units: Mapping[Op, int]
    ) -> None:
        # The placeholder orders say which backwards are split; the dependency relation asks for nothing else.
        self._plan = Schedule(
            name=name,
            num_microbatches=num_microbatches,
            placement=placement,
            orders=tuple(tuple(action for stream in rank for action in stream) for rank in streams),
        )
        self._actions = [action for order in self._plan.orders for action in order]
        self._units = [units[action.op] for action in self._actions]
        self._number = {action: index for index, action in enumerate(self._actions)}
        flat = [(rank, len(stream)) for rank, group in enumerate(streams) for stream in group]
        self._rank_of = [rank for rank, _ in flat]  # by stream
        self._stream_of = [stream for stream, (_, length) in enumerate(flat) for _ in range(length)]
        self._bounds = [0]
        for _, length in flat:
            self._bounds.append(self._bounds[-1] + length)
        self._users: list[list[int]] = [[] for _ in self._actions]
        self._num_needs = [0] * len(self._actions)
        for index, action in enumerate(self._actions):
            needs = dependencies(action, self._plan)
            self._num_needs[index] = len(needs)
            for need in needs:
                self._users[self._number[need]].append(index)

    def weave(
        self, preference: Callable[[Action], Any], also_needs: Mapping[Action, Action] | None = None
    ) -> tuple[Schedule, int]:
        """Whenever a rank is free, it starts the head of one of its streams that is ready.

        Args:
            preference: the ready head with the smallest value starts first; ties go to the first stream.
            also_needs: additional dependencies of some actions.

        Returns:
            The schedule and its makespan.
        """
        missing, heads = self._num_needs.copy(), self._bounds[:-1]
        more_users: dict[int, int] = {}
        for action, need in (also_needs or {}).items():
            missing[self._number[action]] += 1
            more_users[self._number[need]] = self._number[action]
        ranks = range(self._plan.num_ranks)
        ready: list[list[tuple[Any, int]]] = [[] for _ in ranks]  # heaps of (preference, stream)
        orders: list[list[Action]] = [[] for _ in ranks]
        running: list[tuple[int, int]] = []  # heap of (end, action)
        free, now = [True for _ in ranks], 0

        def offer(stream: int) -> None:
            head = heads[stream]
            if head < self._bounds[stream + 1] and not missing[head]:
                heapq.heappush(ready[self._rank_of[stream]], (preference(self._actions[head]), stream))

        for stream in range(len(heads)):
            offer(stream)
        woken = set(ranks)
        while woken:
            for rank in woken:
                if free[rank] and ready[rank]:
                    _, stream = heapq.heappop(ready[rank])
                    index = heads[stream]
                    orders[rank].append(self._actions[index])
                    heapq.heappush(running, (now + self._units[index], index))
                    free[rank] = False
                    heads[stream] += 1
                    offer(stream)
            woken.clear()
            now = running[0][0] if running else now
            while running and running[0][0] == now:
                _, index = heapq.heappop(running)
                rank = self._rank_of[self._stream_of[index]]
                free[rank] = True
                woken.add(rank)
                more = more_users.get(index)
                for user in self._users[index] if more is None else (*self._users[index], more):
                    missing[user] -= 1
                    stream = self._stream_of[user]
                    if not missing[user] and heads[stream] == user:
                        offer(stream)
                        woken.add(self._rank_of[stream])
        return replace(self._plan, orders=tuple(map(tuple, orders))), now
