"""Schedules and programs as text and JSON; each reads back what it wrote. `pipeloom.ir.torch_csv` has torch's CSV.

0F0 0F1 0B0 0B1        one line a rank: actions in order
1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import Action, Op
from pipeloom.ir.data_axis import DataAxis, DataStrategy, Granularity
from pipeloom.ir.json_text import load_json
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Orders, Program, Schedule, WeightPolicy

# Longest names first, so that SEND_F is not read as an op S...
_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_ACTION = re.compile(rf"(\d{{1,9}})({_OPS})(?:(\d{{1,9}})(?:\.(\d{{1,9}}))?)?")


def parse_action(text: str) -> Action:
    """``"2F0.3"`` -> ``Action(2, Op.F, 0, 3)``; the inverse of ``str``."""
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"{text!r} is no action: write stage, op, micro-batch and slice, like 2F0 or 2F0.3")
    stage, op, microbatch, piece = match.groups()
    return Action(
        int(stage),
        Op(op),
        None if microbatch is None else int(microbatch),
        None if piece is None else int(piece),
    )


def format_orders(orders: Orders) -> str:
    """One line a rank, actions separated by blanks."""
    return "\n".join(" ".join(map(str, order)) for order in orders) + "\n"


def parse_orders(text: str) -> Orders:
    """The inverse of `format_orders`; blank lines are ranks without actions."""
    return tuple(tuple(parse_action(word) for word in line.split()) for line in text.rstrip("\n").split("\n"))


def to_json(schedule: Schedule) -> str:
    """The whole schedule as one JSON object."""
    return json.dumps(
        {
            "name": schedule.name,
            "num_microbatches": schedule.num_microbatches,
            "num_slices": schedule.num_slices,
            "placement": [list(ranks) for ranks in schedule.placement.replicas],
            "weights": schedule.weights.value,
            "microbatches_per_update": schedule.microbatches_per_update,
            "forward_only": schedule.forward_only,
            "overlapped": sorted([str(first), str(second)] for first, second in schedule.overlapped),
            "orders": [" ".join(map(str, order)) for order in schedule.orders],
        },
        indent=1,
    )


def from_json(text: str) -> Schedule:
    """The inverse of `to_json`.

    Raises:
        ScheduleError: the text is no JSON of a schedule.
    """
    try:
        data: dict[str, Any] = load_json(text)
        count = data.get("microbatches_per_update")
        return Schedule(
            name=str(data["name"]),
            num_microbatches=int(data["num_microbatches"]),
            num_slices=int(data["num_slices"]),
            placement=Placement(tuple(tuple(int(rank) for rank in ranks) for ranks in data["placement"])),
            weights=WeightPolicy(data["weights"]),
            microbatches_per_update=None if count is None else int(count),
            forward_only=bool(data["forward_only"]),
            overlapped=frozenset((parse_action(a), parse_action(b)) for a, b in data["overlapped"]),
            orders=tuple(tuple(parse_action(word) for word in order.split()) for order in data["orders"]),
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"not the JSON of a schedule ({error}): write it with pipeloom.ir.text.to_json") from error


def program_to_json(program: Program) -> str:
    """The whole program as one JSON object, its schedule inside it."""
    return json.dumps(
        {
            "schedule": json.loads(to_json(program.schedule)),
            "gradient_groups": program.gradient_groups,
            "data": None if program.data is None else asdict(program.data),
            "orders": [" ".join(map(str, order)) for order in program.orders],
        },
        indent=1,
    )


def program_from_json(text: str) -> Program:
    """The inverse of `program_to_json`.

    Raises:
        ScheduleError: the text is no JSON of a program.
    """
    try:
        data: dict[str, Any] = load_json(text)
        axis = data["data"]
        return Program(
            schedule=from_json(json.dumps(data["schedule"])),
            orders=tuple(tuple(parse_action(word) for word in order.split()) for order in data["orders"]),
            gradient_groups=tuple(tuple(map(int, group)) for group in data["gradient_groups"]),
            data=None if axis is None else _data_axis(axis),
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(
            f"not the JSON of a program ({error}): write it with pipeloom.ir.text.program_to_json"
        ) from error


def _data_axis(data: dict[str, Any]) -> DataAxis:
    return DataAxis(
        degree=int(data["degree"]),
        strategy=DataStrategy(data["strategy"]),
        granularity=Granularity(data["granularity"]),
        separate_master=bool(data["separate_master"]),
    )
