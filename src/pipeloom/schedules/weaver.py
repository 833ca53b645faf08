"""Merge several orders into one per rank, greedily in time, for Chimera and Hanayo."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.ir import Action, Op, Placement, Schedule, dependencies

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
