"""Weave several orders into one a rank, greedily in time: what Chimera and Hanayo are made with."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Schedule, dependencies

Streams = Sequence[Sequence[Sequence[Action]]]


def merge(
    name: str,
    placement: Placement,
    num_microbatches: int,
    streams: Streams,
    *,
    units: dict[Op, int],
    preference: Callable[[Action], Any],
    most_in_flight: int | None = None,
) -> tuple[Schedule, int]:
    """Whenever a rank is free, it starts the head of one of its streams that is ready: the schedule and its makespan.

    Args:
        name: of the schedule.
        placement: which ranks hold which stage.
        num_microbatches: of one step.
        streams: for each rank, orders that it keeps each by itself; together all its actions.
        units: time of each op on one stage.
        preference: of several heads that are ready, the one with the smallest value starts.
        most_in_flight: micro-batches that may have entered stage 0 and not yet left it again.
    """
    # The placeholder orders say which backwards are split; the dependency relation asks for nothing else.
    plan = Schedule(
        name=name,
        num_microbatches=num_microbatches,
        placement=placement,
        orders=tuple(tuple(action for stream in rank for action in stream) for rank in streams),
    )
    ended: dict[Action, int] = {}
    heads = [[0] * len(rank) for rank in streams]
    orders: list[list[Action]] = [[] for _ in streams]
    free_at = [0] * len(streams)
    in_flight = 0
    moments, seen = [0], {0}
    while moments:
        now = heapq.heappop(moments)
        for rank, rank_streams in enumerate(streams):
            if free_at[rank] > now:
                continue
            ready = []
            for number, stream in enumerate(rank_streams):
                if heads[rank][number] == len(stream):
                    continue
                action = stream[heads[rank][number]]
                full = action.op is Op.F and action.stage == 0 and in_flight == most_in_flight
                if not full and all(ended.get(need, now + 1) <= now for need in dependencies(action, plan)):
                    ready.append((preference(action), number, action))
            if not ready:
                continue
            _, number, action = min(ready)
            heads[rank][number] += 1
            orders[rank].append(action)
            free_at[rank] = ended[action] = now + units[action.op]
            if action.stage == 0:
                in_flight += {Op.F: 1, Op.B: -1}.get(action.op, 0)
            if free_at[rank] not in seen:
                seen.add(free_at[rank])
                heapq.heappush(moments, free_at[rank])
    return replace(plan, orders=tuple(map(tuple, orders))), max(free_at)
