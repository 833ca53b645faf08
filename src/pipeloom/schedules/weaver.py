"""Merge several orders into one per rank, greedily in time, for Chimera and Hanayo."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from pipeloom.ir import Action, Op, Placement, Schedule

Streams = Sequence[Sequence[Sequence[Action]]]


class Weaver:
    """Streams of forwards and whole backwards with their dependencies; `weave` merges them into schedules.

    Actions are numbered stream by stream over all ranks. An action is offered to its rank once it is the head of its
    stream and its dependencies have ended.

    Args:
        name: the name of the schedules.
        placement: which ranks hold which stage.
        num_microbatches: micro-batches per step.
        streams: for each rank, orders that stay as they are; together they are all its actions.
        units: time of F and B on one stage, at least 1.
    """

    def __init__(
        self, name: str, placement: Placement, num_microbatches: int, streams: Streams, units: Mapping[Op, int]
    ) -> None:
        self._name, self._placement, self._num_microbatches = name, placement, num_microbatches
        self._actions = [action for rank in streams for stream in rank for action in stream]
        self._units = [units[action.op] for action in self._actions]
        flat = [(rank, len(stream)) for rank, group in enumerate(streams) for stream in group]
        self._rank_of = [rank for rank, _ in flat]  # by stream
        self._stream_of = [stream for stream, (_, length) in enumerate(flat) for _ in range(length)]
        self._bounds = [0, *accumulate(length for _, length in flat)]
        stages = range(placement.num_stages)
        self._number = {op: [[0] * num_microbatches for _ in stages] for op in (Op.F, Op.B)}
        for index, (stage, op, microbatch, _) in enumerate(self._actions):
            assert microbatch is not None
            self._number[op][stage][microbatch] = index
        self._users: list[tuple[int, ...]] = [()] * len(self._actions)
        self._num_needs = [0] * len(self._actions)
        forwards, backwards = self._number[Op.F], self._number[Op.B]
        for stage in stages:
            last = stage + 1 == placement.num_stages
            for b, (forward, backward) in enumerate(zip(forwards[stage], backwards[stage], strict=True)):
                self._users[forward] = (backward,) if last else (backward, forwards[stage + 1][b])
                self._users[backward] = (backwards[stage - 1][b],) if stage else ()
                self._num_needs[forward] = 1 if stage else 0
                self._num_needs[backward] = 1 if last else 2

    def weave(
        self,
        preference: Callable[[Action], int],
        *,
        also_needs: Mapping[Action, Action] | None = None,
        most_live: int | None = None,
    ) -> tuple[Schedule, int] | None:
        """Whenever a rank is free, it starts the head of one of its streams that is ready.

        Args:
            preference: the ready head with the smallest value starts first; ties go to the first stream.
            also_needs: additional dependencies of some actions, one of each.
            most_live: live activations that a rank may hold.

        Returns:
            The schedule and its makespan. None: a rank would hold more than `most_live`.
        """
        actions, units, bounds, rank_of = self._actions, self._units, self._bounds, self._rank_of
        missing, heads = self._num_needs.copy(), bounds[:-1]
        more_users: dict[int, int] = {}
        for action, need in (also_needs or {}).items():
            missing[self._index(action)] += 1
            more_users[self._index(need)] = self._index(action)
        ranks = range(self._placement.num_ranks)
        ready: list[list[tuple[int, int]]] = [[] for _ in ranks]  # heaps of (preference, stream)
        orders: list[list[Action]] = [[] for _ in ranks]
        free, live = [True] * len(ranks), [0] * len(ranks)
        ends: list[list[int]] = [[] for _ in range(max(units) + 1)]  # by end, modulo: what runs
        now = num_running = 0

        def offer(stream: int) -> None:
            head = heads[stream]
            if head < bounds[stream + 1] and not missing[head]:
                heapq.heappush(ready[rank_of[stream]], (preference(actions[head]), stream))

        for stream in range(len(heads)):
            offer(stream)
        woken = set(ranks)
        while woken:
            for rank in woken:
                if not (free[rank] and ready[rank]):
                    continue
                _, stream = heapq.heappop(ready[rank])
                index = heads[stream]
                live[rank] += 1 if actions[index].op is Op.F else -1
                if most_live is not None and live[rank] > most_live:
                    return None
                orders[rank].append(actions[index])
                ends[(now + units[index]) % len(ends)].append(index)
                num_running += 1
                free[rank] = False
                heads[stream] += 1
                offer(stream)
            woken.clear()
            while num_running and not ends[now % len(ends)]:
                now += 1
            ended, ends[now % len(ends)] = ends[now % len(ends)], []
            num_running -= len(ended)
            for index in ended:
                rank = rank_of[self._stream_of[index]]
                free[rank] = True
                woken.add(rank)
                users, more = self._users[index], more_users.get(index)
                for user in users if more is None else (*users, more):
                    missing[user] -= 1
                    if not missing[user] and heads[stream := self._stream_of[user]] == user:
                        offer(stream)
                        woken.add(rank_of[stream])
        schedule = Schedule(
            name=self._name,
            num_microbatches=self._num_microbatches,
            placement=self._placement,
            orders=tuple(map(tuple, orders)),
        )
        return schedule, now

    def _index(self, action: Action) -> int:
        assert action.microbatch is not None
        return self._number[action.op][action.stage][action.microbatch]
