"""Schedules as text, as JSON, and as the CSV of torch.distributed.pipelining; each reads back what it wrote.

0F0 0F1 0B0 0B1        one line a rank: actions in order
1F0 1B0 1F1 1B1
"""

from __future__ import annotations

import json
import re
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Orders, Program, Schedule, WeightPolicy

# Longest names first, so that SEND_F is not read as an op S...
_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_UNIT = "OVERLAP_F_B"
_ACTION = re.compile(rf"(\d+)({_OPS})(?:(\d+)(?:\.(\d+))?)?")


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
        data: dict[str, Any] = json.loads(text)
        return Schedule(
            name=str(data["name"]),
            num_microbatches=int(data["num_microbatches"]),
            num_slices=int(data["num_slices"]),
            placement=Placement(tuple(tuple(int(rank) for rank in ranks) for ranks in data["placement"])),
            weights=WeightPolicy(data["weights"]),
            forward_only=bool(data["forward_only"]),
            overlapped=frozenset((parse_action(a), parse_action(b)) for a, b in data["overlapped"]),
            orders=tuple(tuple(parse_action(word) for word in order.split()) for order in data["orders"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ScheduleError):
            raise
        raise ScheduleError(f"not the JSON of a schedule ({error}): write it with pipeloom.ir.text.to_json") from error


def to_csv(pipeline: Schedule | Program) -> str:
    """The CSV that torch.distributed.pipelining loads: one row a rank, one cell an action or an overlapped unit.

    A unit is one cell: ``(0F3;1B2)OVERLAP_F_B``.
    """
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    partners, seconds = schedule.partners, {second for _, second in schedule.overlapped}
    rows = (
        (f"({a};{partners[a]}){_UNIT}" if a in partners else str(a) for a in order if a not in seconds)
        for order in pipeline.orders
    )
    return "\n".join(map(",".join, rows)) + "\n"


def _parse_cell(cell: str) -> tuple[Action, ...]:
    """The action of a cell, the two of an overlapped unit, or none."""
    cell = cell.strip()
    if not cell:
        return ()
    if not cell.endswith(f"){_UNIT}"):
        return (parse_action(cell),)
    members = cell[: -len(_UNIT) - 1].removeprefix("(").split(";")
    if len(members) != 2:
        raise ScheduleError(f"CSV has a cell {cell!r}: an overlapped unit has two members, like (0F3;1B2){_UNIT}")
    return parse_action(members[0]), parse_action(members[1])


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read a compute-only or lowered CSV; communication is dropped, since the passes put it back.

    The placement is read off the forwards: a stage lives where its forwards stand, and the replica that runs the
    lowest micro-batch is its first.

    Raises:
        ScheduleError: a cell is no action, or the stages are not numbered without gaps.
    """
    rows = [[_parse_cell(cell) for cell in line.split(",")] for line in text.rstrip("\n").split("\n")]
    orders = tuple(tuple(action for cell in row for action in cell if action.op in COMPUTE_OPS) for row in rows)
    homes: dict[int, dict[int, int]] = {}  # stage -> rank -> lowest micro-batch that the rank runs of it
    microbatches = slices = 0
    for rank, order in enumerate(orders):
        for stage, op, microbatch, piece in order:
            if op is Op.F:
                ranks = homes.setdefault(stage, {})
                ranks[rank] = min(ranks.get(rank, microbatch or 0), microbatch or 0)
                microbatches = max(microbatches, 1 + (microbatch or 0))
                slices = max(slices, 1 + (piece or 0))
    if sorted(homes) != list(range(len(homes))):
        raise ScheduleError(f"CSV has forwards of stages {sorted(homes)}: stages count from 0 without gaps; renumber")
    replicas = (sorted(homes[stage], key=lambda rank: homes[stage][rank]) for stage in range(len(homes)))
    return Schedule(
        name=name,
        num_microbatches=microbatches,
        num_slices=max(1, slices),
        placement=Placement(tuple(map(tuple, replicas))),
        orders=orders,
        overlapped=frozenset((cell[0], cell[1]) for row in rows for cell in row if len(cell) == 2),
        forward_only=all(action.op is Op.F for order in orders for action in order),
    )
