"""Evaluation: the same placement and forward order, without backwards."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir.action import Op
from pipeloom.ir.schedule import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The forwards of `schedule` in their order. Legal for every legal schedule: leaving actions out adds no wait."""
    orders = tuple(tuple(action for action in order if action.op is Op.F) for order in schedule.orders)
    return replace(schedule, orders=orders, overlapped=frozenset(), forward_only=True)
