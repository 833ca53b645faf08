"""Values that skip stages: which stage hands values to which later stage, beside the ordinary messages.

    stage 0 ──> stage 1 ──> stage 2 ──> stage 3        ordinary messages, between neighbours
       └───────────── skip ───────────────┘            on a channel of its own, straight to its user

A `Skip` joins two stages, for all values that one hands to the other. Between stages of one rank it needs no message.
A value that several stages of one rank use reaches the rank once: the first of these stages hands it on (`routes`), and
returns the sum of the gradients.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipeloom.ir.action import Action, Op
from pipeloom.ir.placement import Placement


class Skip(NamedTuple):
    """Values that go from stage `source` to the later stage `target`.

    Attributes:
        source, target: stages.
        has_gradient: whether gradients of the values go back.
    """

    source: int
    target: int
    has_gradient: bool = True


class SkippingValue(NamedTuple):
    """A value that later stages use.

    Attributes:
        name: unique among the values of a model.
        maker: the stage that makes it.
        users: the stages that use it, ascending.
        has_gradient: whether its users return a gradient.
    """

    name: str
    maker: int
    users: tuple[int, ...]
    has_gradient: bool = True


def routes(values: Iterable[SkippingValue], placement: Placement) -> dict[Skip, tuple[str, ...]]:
    """The skips that carry `values`, sorted, each with the names of its values in their order.

    A stage gets a value from the last earlier user on the same ranks, else from its maker.
    """
    names: dict[tuple[int, int], list[str]] = {}
    trained: set[tuple[int, int]] = set()
    for value in values:
        nearest: dict[tuple[int, ...], int] = {}  # by ranks, the last stage there that has the value
        for user in value.users:
            pair = nearest.get(placement.replicas[user], value.maker), user
            nearest[placement.replicas[user]] = user
            names.setdefault(pair, []).append(value.name)
            if value.has_gradient:
                trained.add(pair)
    return {Skip(*pair, pair in trained): tuple(names[pair]) for pair in sorted(names)}


def skip_receives(action: Action, skips: Sequence[Skip], placement: Placement) -> list[Action]:
    """The receives of values (before an F), or of their gradients (before a B or I), that skip stages."""
    stage, op, b, _ = action
    if op is Op.F:
        found = [(Op.RECV_SKIP, skip.source) for skip in skips if skip.target == stage]
    elif op in (Op.B, Op.I):
        found = [(Op.RECV_SKIP_GRAD, skip.target) for skip in skips if skip.source == stage and skip.has_gradient]
    else:
        return []
    assert b is not None
    return [
        Action(stage, receive, b, other)
        for receive, other in found
        if placement.rank_of(other, b) != placement.rank_of(stage, b)
    ]


def skip_sends(action: Action, skips: Sequence[Skip], placement: Placement) -> list[Action]:
    """The sends after an F, B or I of values, or of their gradients, that skip stages."""
    stage, op, b, _ = action
    if op is Op.F:
        found = [(Op.SEND_SKIP, skip.target) for skip in skips if skip.source == stage]
    elif op in (Op.B, Op.I):
        found = [(Op.SEND_SKIP_GRAD, skip.source) for skip in skips if skip.target == stage and skip.has_gradient]
    else:
        return []
    assert b is not None
    return [
        Action(stage, send, b, other)
        for send, other in found
        if placement.rank_of(other, b) != placement.rank_of(stage, b)
    ]
