"""Types of what people put into pipelines by hand: what only looks like an action, an order or a number is refused.

Whether numbers and orders are legal, `pipeloom.ir.check.checker` says; it stands on what is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index, itemgetter
from typing import Any, TypeVar, cast

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.action import Action, Op
from pipeloom.ir.large.order import Order

T = TypeVar("T")

_FIELDS = (  # of an action: where each stands, and the types that it may have
    (itemgetter(0), frozenset({int})),
    (itemgetter(1), frozenset({Op})),
    (itemgetter(2), frozenset({int, type(None)})),
    (itemgetter(3), frozenset({int, type(None)})),
)


def of_type(value: object, kind: type[T], what: str) -> T:
    """`value`, which has to be of `kind`.

    Raises:
        ScheduleError: it is not.
    """
    if not isinstance(value, kind):
        raise ScheduleError(f"{what} is {folded(value)}: it has to be of type {kind.__name__}; pass one")
    return value


def whole_number(value: object, what: str) -> int:
    """`value` as an int; numpy's numbers are one.

    Raises:
        ScheduleError: it is no whole number.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{what} is {folded(value)}: it has to be a whole number; pass an int")
    return index(cast("Any", value))


def as_orders(orders: object, what: str) -> tuple[Sequence[Action], ...]:
    """`orders` as a tuple of what holds still: tuples and `Order`. What they hold, `check_actions` looks at.

    Raises:
        ScheduleError: they are no sequence of sequences.
    """
    if isinstance(orders, str) or not isinstance(orders, Iterable):
        raise ScheduleError(
            f"{what} has orders {folded(orders)}: each rank has a sequence of actions; pass a tuple of tuples, "
            "and text through pipeloom.schedules.from_orders"
        )
    made: list[Sequence[Action]] = []
    for rank, order in enumerate(orders):
        if isinstance(order, str) or not isinstance(order, Iterable):
            raise ScheduleError(
                f"{what} has {folded(order)} for rank {rank}: the order of a rank is a sequence of actions; pass a "
                "tuple, and text through pipeloom.schedules.from_orders"
            )
        made.append(order if isinstance(order, (tuple, Order)) else tuple(order))
    return tuple(made)


def as_pairs(pairs: object, what: str) -> frozenset[tuple[Action, Action]]:
    """Overlapped pairs as a set of pairs of actions.

    Raises:
        ScheduleError: they are something else.
    """
    made: list[Any] = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in made:
        if not (isinstance(pair, tuple) and len(pair) == 2 and has_actions(pair)):
            raise ScheduleError(
                f"{what} has the overlapped pair {folded(pair)}: a pair is a tuple of an F and the B or I behind it; "
                "pass two Actions"
            )
    return frozenset(made)


def check_groups(groups: object, num_stages: int, what: str) -> None:
    """Refuse gradient groups that are no tuples of stages.

    Raises:
        ScheduleError: they are not.
    """
    for group in of_type(groups, tuple, f"the gradient groups of {what}"):
        for stage in of_type(group, tuple, f"a gradient group of {what}"):
            if not 0 <= whole_number(stage, f"a stage in a gradient group of {what}") < num_stages:
                raise ScheduleError(
                    f"{what} has the gradient group {folded(group)}: stages are 0..{num_stages - 1}; correct it"
                )


def has_actions(order: Sequence[Any]) -> bool:
    """Whether all there is are actions, of whole numbers and an `Op`."""
    if isinstance(order, Order):
        return True
    return all(type(a) is Action for a in order) and all(
        kinds.issuperset(map(type, map(field, order))) for field, kinds in _FIELDS
    )


def check_actions(orders: Sequence[Sequence[Action]], what: str) -> None:
    """Refuse the first thing in `orders` that is no action.

    Raises:
        ScheduleError: there is one.
    """
    for rank, order in enumerate(orders):
        if has_actions(order):
            continue
        place, odd = next((place, action) for place, action in enumerate(order) if not has_actions((action,)))
        if isinstance(odd, Action):
            rule = "an action is an int, an Op, and an int or None for micro-batch and slice; correct its fields"
        else:
            rule = "an order holds Actions; write Action(0, Op.F, 0), or read text with pipeloom.schedules.from_orders"
        raise ScheduleError(f"{what}: rank {rank} has {folded(odd)} at place {place}: {rule}")
