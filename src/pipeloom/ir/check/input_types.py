"""Validate the types of hand-made actions, orders and numbers, on which the rules of legality rely."""

from collections.abc import Iterable, Iterator, Sequence
from operator import index, itemgetter
from typing import Any, TypeVar, cast

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.action import Action, Op
from pipeloom.ir.order import Order

T = TypeVar("T")

_FIELDS = (  # of an action: where each stands, and the types that it may have
    (itemgetter(0), frozenset({int})),
    (itemgetter(1), frozenset({Op})),
    (itemgetter(2), frozenset({int, type(None)})),
    (itemgetter(3), frozenset({int, type(None)})),
)


def of_type(value: object, kind: type[T], what: str) -> T:
    """`value`, validated to be of type `kind`.

    Raises:
        ScheduleError: it is not.
    """
    if not isinstance(value, kind):
        raise ScheduleError(f"{what} is {folded(value)}: must be of type {kind.__name__}.")
    return value


def whole_number(value: object, what: str) -> int:
    """`value` as an int; numpy's integers are accepted.

    Raises:
        ScheduleError: it is not an integer.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{what} is {folded(value)}: must be an int.")
    return index(cast("Any", value))


def as_orders(orders: object, what: str) -> tuple[Sequence[Action], ...]:
    """`orders` as a tuple of immutable sequences: tuples and `Order`. Their entries are not looked at.

    Raises:
        ScheduleError: `orders` is not a sequence of sequences.
    """
    if isinstance(orders, str) or not isinstance(orders, Iterable):
        raise ScheduleError(
            f"{what} has orders {folded(orders)}: each rank has a sequence of actions. Pass a tuple of tuples, or "
            "text to pipeloom.schedules.from_orders."
        )
    made: list[Sequence[Action]] = []
    for rank, order in enumerate(orders):
        if isinstance(order, str) or not isinstance(order, Iterable):
            raise ScheduleError(
                f"{what} has {folded(order)} for rank {rank}: the order of a rank is a sequence of actions. Pass a "
                "tuple, or text to pipeloom.schedules.from_orders."
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
                f"{what} has the overlapped pair {folded(pair)}: a pair is a tuple of an F and the B or I behind it. "
                "Pass two Actions."
            )
    return frozenset(made)


def check_groups(groups: object, num_stages: int, what: str) -> None:
    """Validate gradient groups.

    Raises:
        ScheduleError: they are not tuples of stages.
    """
    for group in of_type(groups, tuple, f"the gradient groups of {what}"):
        for stage in of_type(group, tuple, f"a gradient group of {what}"):
            if not 0 <= whole_number(stage, f"a stage in a gradient group of {what}") < num_stages:
                raise ScheduleError(
                    f"{what} has the gradient group {folded(group)}: stages must be in 0..{num_stages - 1}."
                )


def check_skips(skips: object, num_stages: int, what: str) -> None:
    """Validate the skips of a program.

    Raises:
        ScheduleError: they are not a tuple of Skip, or do not lead to a later stage.
    """
    pairs = [skip[:2] for skip in of_type(skips, tuple, f"the skips of {what}")]
    for source, target in pairs:
        if not 0 <= source < target < num_stages:
            raise ScheduleError(
                f"{what} has a skip from stage {source} to stage {target}: a value goes to a later stage, up to "
                f"{num_stages - 1}. Swap the stages."
            )
    if len(set(pairs)) != len(pairs):
        raise ScheduleError(f"{what} lists a skip twice: two stages have one skip for all their values. Join them.")


def has_actions(order: Sequence[Any]) -> bool:
    """Whether all entries are actions made of ints and an `Op`."""
    if isinstance(order, Order):
        return True
    return all(type(a) is Action for a in order) and all(
        kinds.issuperset(map(type, map(field, order))) for field, kinds in _FIELDS
    )


ACTIONS_ONLY = "an order holds Actions: an int, an Op, and for micro-batch and slice an int or None each"


def foreign_entries(orders: Sequence[Sequence[Action]]) -> Iterator[tuple[str, str]]:
    """The entries of `orders` that are not actions, each with the fix."""
    for rank, order in enumerate(orders):
        for place, entry in enumerate(order if not has_actions(order) else ()):
            if not has_actions((entry,)):
                fix = (
                    "Correct its fields"
                    if isinstance(entry, Action)
                    else "Write Action(0, Op.F, 0), or read text with pipeloom.schedules.from_orders"
                )
                yield f"rank {rank} has {folded(entry)} at position {place}", fix
