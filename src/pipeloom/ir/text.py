"""Schedules as text and JSON, with exact round trips, and schedules from their orders alone.

0F0 0F1 0B0 0B1        one line per rank: actions in order
1F0 1B0 1F1 1B1
"""

import json
import re
from collections.abc import Mapping

from pipeloom.common.json_reader import Entry, read_json
from pipeloom.errors import ScheduleError, folded, listed
from pipeloom.ir.action import Action, Op
from pipeloom.ir.check.input_types import ACTIONS_ONLY, as_orders, foreign_entries, of_type
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Orders, Schedule, WeightPolicy, schedule_of

# Longest names first, so that SEND_F is not read as an op S...
_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_SCHEDULE_KEYS = (
    *("name", "num_microbatches", "num_slices", "placement", "weights", "forward_only", "overlapped", "orders"),
)
_ACTION = re.compile(rf"(\d{{1,9}})({_OPS})(?:(\d{{1,9}})(?:\.(\d{{1,9}}))?)?")


def parse_action(text: str) -> Action:
    """``"2F0.3"`` -> ``Action(2, Op.F, 0, 3)``; the inverse of ``str``."""
    match = _ACTION.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ScheduleError(f"{folded(text)}: an action is stage, op, micro-batch and slice. Write 2F0 or 2F0.3.")
    stage, op, microbatch, piece = match.groups()
    return Action(int(stage), Op(op), *(None if number is None else int(number) for number in (microbatch, piece)))


def format_orders(orders: Orders) -> str:
    """One line per rank, actions separated by blanks."""
    return "\n".join(" ".join(map(str, order)) for order in as_orders(orders, "a text")) + "\n"


def parse_orders(text: str) -> Orders:
    """The inverse of `format_orders`; blank lines are ranks without actions.

    Raises:
        ScheduleError: a word is not an action, or `text` is not a str.
    """
    lines = of_type(text, str, "the text of orders").rstrip("\n").split("\n")
    return tuple(tuple(map(parse_action, line.split())) for line in lines)


def schedule_from_orders(
    orders: Orders, *, name: str, overlapped: frozenset[tuple[Action, Action]] = frozenset()
) -> Schedule:
    """A schedule with these orders. `pipeloom.ir.check` validates that it is legal.

    A stage is placed on the ranks that run its forwards; the first replica is the rank with the lowest micro-batch.
    The highest numbers in the forwards give the numbers of micro-batches and slices.

    Raises:
        ScheduleError: an entry is not an action, stages are not numbered without gaps, or there are no forwards.
    """
    orders = as_orders(orders, f"schedule {name!r}")
    for what, fix in foreign_entries(orders):
        raise ScheduleError(f"schedule {name!r}: {what}: {ACTIONS_ONLY}. {fix}.")
    homes: dict[int, dict[int, int]] = {}  # stage -> rank -> lowest micro-batch that the rank runs of it
    microbatches = slices = 0
    for rank, order in enumerate(orders):
        for stage, op, microbatch, piece in order:
            if op is Op.F:
                ranks = homes.setdefault(stage, {})
                ranks[rank] = min(ranks.get(rank, microbatch or 0), microbatch or 0)
                microbatches = max(microbatches, 1 + (microbatch or 0))
                slices = max(slices, 1 + (piece or 0))
    if not homes:
        raise ScheduleError(f"schedule {name!r} has no forwards: every stage must run every micro-batch. Add 0F0.")
    if sorted(homes) != list(range(len(homes))):
        lost = min(stage for stage in range(max(homes)) if stage not in homes)
        raise ScheduleError(
            f"schedule {name!r} has forwards of stages {listed(sorted(homes))} and none of stage {lost}: stages must "
            f"be numbered from 0 without gaps. Add {lost}F0, ..., or renumber the stages."
        )
    replicas = (sorted(homes[stage], key=lambda rank: homes[stage][rank]) for stage in range(len(homes)))
    return Schedule(
        name=name,
        num_microbatches=microbatches,
        num_slices=max(1, slices),
        placement=Placement(tuple(map(tuple, replicas))),
        orders=orders,
        overlapped=overlapped,
        forward_only=all(action.op is Op.F for order in orders for action in order),
    )


def to_json(schedule: Schedule) -> str:
    """The schedule as one JSON object."""
    schedule = schedule_of(schedule)
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
    """The inverse of `to_json`; also reads the schedule from the JSON of a plan.

    Raises:
        ScheduleError: `text` is not the JSON of a schedule.
    """
    entry = read_json(text, "the schedule", "the output of pipeloom.ir.text.to_json", ScheduleError)
    if isinstance(entry.value, Mapping) and "schedule" in entry.value:
        entry = Entry(entry.value["schedule"], entry.source, "schedule", ScheduleError)
    data = entry.fields(_SCHEDULE_KEYS, ("microbatches_per_update",))
    count = data.get("microbatches_per_update")
    places = [place.members() for place in data["placement"].members()]
    pairs = [pair.members(length=2) for pair in data["overlapped"].members()]
    return Schedule(
        name=data["name"].text(),
        num_microbatches=data["num_microbatches"].whole(),
        num_slices=data["num_slices"].whole(),
        placement=Placement(tuple(tuple(rank.whole() for rank in place) for place in places)),
        weights=data["weights"].word(WeightPolicy),
        microbatches_per_update=None if count is None or count.value is None else count.whole(),
        forward_only=data["forward_only"].flag(),
        overlapped=frozenset((parse_action(a.text()), parse_action(b.text())) for a, b in pairs),
        orders=tuple(tuple(map(parse_action, order.text().split())) for order in data["orders"].members()),
    )
