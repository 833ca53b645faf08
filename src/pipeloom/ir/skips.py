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
    stage, op = action.stage, action.op
    if op is Op.F:
        return _messages(action, Op.RECV_SKIP, [s.source for s in skips if s.target == stage], placement)
    if op in (Op.B, Op.I):
        users = [s.target for s in skips if s.source == stage and s.has_gradient]
        return _messages(action, Op.RECV_SKIP_GRAD, users, placement)
    return []


def skip_sends(action: Action, skips: Sequence[Skip], placement: Placement) -> list[Action]:
    """The sends after an F, B or I of values, or of their gradients, that skip stages."""
    stage, op = action.stage, action.op
    if op is Op.F:
        return _messages(action, Op.SEND_SKIP, [s.target for s in skips if s.source == stage], placement)
    if op in (Op.B, Op.I):
        makers = [s.source for s in skips if s.target == stage and s.has_gradient]
        return _messages(action, Op.SEND_SKIP_GRAD, makers, placement)
    return []


def _messages(action: Action, op: Op, others: Sequence[int], placement: Placement) -> list[Action]:
    """The messages between an action's stage and those of `others` that are on another rank."""
    b = action.microbatch
    assert b is not None
    here = placement.rank_of(action.stage, b)
    return [Action(action.stage, op, b, other) for other in others if placement.rank_of(other, b) != here]
