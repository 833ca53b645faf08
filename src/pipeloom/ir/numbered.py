"""The actions of a pipeline by number, and what each awaits of other ranks: found once, for many simulations.

An action awaits the results of `pipeloom.ir.schedule.dependencies`. Those that its own rank has computed before are
there, so that mostly a receive alone awaits something: its send.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pipeloom.ir.action import RECEIVES, SENDS, Action, Op
from pipeloom.ir.schedule import Program, Schedule, awaited, dependencies, message_after, peer_of
from pipeloom.ir.walk import in_background, meets

RUNS, PUBLISHES, RECEIVES_RESULT, PAIRED, MEETS, ENDS = range(6)  # kinds of actions
_MAY_BE_IN_BACKGROUND = frozenset({Op.UNSHARD, Op.REDUCE_GRAD, Op.OFFLOAD, Op.RELOAD})
_KINDS = {**dict.fromkeys(Op, RUNS), **dict.fromkeys(SENDS, PUBLISHES), **dict.fromkeys(RECEIVES, RECEIVES_RESULT)}
_MOST_KEPT = 100_000  # actions of a pipeline whose numbers are kept
_KEY, _MESSAGES = "pipeloom.ir.numbered", "pipeloom.ir.numbered.messages"

Work = tuple[int, Op, int | None]  # stage, op and slice, which tell how long an action takes


class RankActions(NamedTuple):
    """What one rank runs, without actions in the background.

    Attributes:
        actions: in their order.
        kinds: of each, RUNS (no other rank awaits it), PUBLISHES (other ranks may, or it is a message to them),
            RECEIVES_RESULT, PAIRED (the first of an overlapped pair) or MEETS (other ranks sum the same gradients);
            ENDS behind the last.
        results: of each, the number of its result.
        needs: of each, the numbers of the results that it awaits and that the rank has not computed before.
        works: by number, what tells how long an action takes.
        work: of each, the number of its work.
        background: by position, the actions in the background that begin before it.
    """

    actions: tuple[Action, ...]
    kinds: list[int]
    results: list[int]
    needs: list[tuple[int, ...]]
    works: list[Work]
    work: list[int]
    background: dict[int, tuple[Action, ...]]


class Numbered(NamedTuple):
    """The actions of a pipeline.

    Attributes:
        ranks: of each rank.
        num_results: numbers are below it; -1 stands for a result that no rank has.
    """

    ranks: list[RankActions]
    num_results: int


class Message(NamedTuple):
    """A SEND, and the rank that it sends to."""

    send: Action
    target: int


def numbered(pipeline: Schedule | Program) -> Numbered:
    """The actions of a legal pipeline by number. They are kept with it, if there are not too many."""
    kept = pipeline.__dict__
    found: Numbered | None = kept.get(_KEY)
    if found is None:
        found = _numbered(pipeline)
        if sum(map(len, pipeline.orders)) <= _MOST_KEPT:
            kept[_KEY] = found
    return found


def messages_of(pipeline: Schedule | Program) -> list[list[Message | None]]:
    """For each rank and action of `RankActions`, the message that leaves with its result, if there is one."""
    kept = pipeline.__dict__
    found: list[list[Message | None]] | None = kept.get(_MESSAGES)
    if found is None:
        found = [_messages(rank.actions, pipeline) for rank in numbered(pipeline).ranks]
        if sum(map(len, pipeline.orders)) <= _MOST_KEPT:
            kept[_MESSAGES] = found
    return found


def _messages(actions: Sequence[Action], pipeline: Schedule | Program) -> list[Message | None]:
    if isinstance(pipeline, Program):
        placement = pipeline.placement
        return [Message(each, peer_of(each, placement)) if each.op in SENDS else None for each in actions]
    placement, sends = pipeline.placement, [message_after(action, pipeline) for action in actions]
    return [None if send is None else Message(send, peer_of(send, placement)) for send in sends]


def _numbered(pipeline: Schedule | Program) -> Numbered:
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    numbers: dict[Action, int] = {}
    many: set[int] = set()  # results that several ranks have
    parts: list[tuple[int, list[Action], list[int], dict[int, tuple[Action, ...]]]] = []
    for order in pipeline.orders:
        first = len(numbers)
        actions, background = _in_foreground(order, schedule)
        results = [numbers.setdefault(action, len(numbers)) for action in actions]
        many.update(number for number in results if number < first)
        parts.append((first, actions, results, background))
    every = [_needs(pipeline, numbers, many, *part[:3]) for part in parts]
    awaited_elsewhere = {number for needs in every for each in needs for number in each}
    ranks = []
    for needs, (_, actions, results, background) in zip(every, parts, strict=True):
        kinds = _kinds(actions, results, awaited_elsewhere, pipeline)
        known: dict[Work, int] = {}
        work = [known.setdefault((stage, op, piece), len(known)) for stage, op, _, piece in actions]
        ranks.append(RankActions(tuple(actions), kinds, results, needs, list(known), work, background))
    return Numbered(ranks, len(numbers))


def _needs(
    pipeline: Schedule | Program,
    numbers: Mapping[Action, int],
    many: Container[int],
    first: int,
    actions: Sequence[Action],
    results: Sequence[int],
) -> list[tuple[int, ...]]:
    """What a rank, whose results have numbers from `first` on along its order, awaits before each action."""
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    needs_of = awaited if schedule.overlapped else dependencies
    number_of, found = numbers.get, list[tuple[int, ...]]()
    for action, own in zip(actions, results, strict=True):
        needs: tuple[int, ...] = ()
        for need in needs_of(action, pipeline):
            number = number_of(need, -1)
            if not first <= number < own or number in many:
                needs = (*needs, number)
        found.append(needs)
    return found


def _in_foreground(order: Iterable[Action], schedule: Schedule) -> tuple[list[Action], dict[int, tuple[Action, ...]]]:
    """The actions that keep a rank busy, and those in the background by the position of the next one."""
    actions: list[Action] = []
    background: dict[int, tuple[Action, ...]] = {}
    for action in order:
        if action.op in _MAY_BE_IN_BACKGROUND and in_background(action, schedule):
            background[len(actions)] = (*background.get(len(actions), ()), action)
        else:
            actions.append(action)
    return actions, background


def _kinds(
    actions: Sequence[Action], results: Sequence[int], elsewhere: Container[int], pipeline: Schedule | Program
) -> list[int]:
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    groups = pipeline.gradient_groups if isinstance(pipeline, Program) else ()
    shared, partners = set(chain.from_iterable(groups)), schedule.partners
    ops = (op for _, op, _, _ in actions)
    kinds = [PUBLISHES if own in elsewhere else _KINDS[op] for op, own in zip(ops, results, strict=True)]
    for at, action in enumerate(actions) if shared or partners else ():
        if action.stage in shared and meets(action):
            kinds[at] = MEETS
        elif action in partners and actions[at + 1 : at + 2] == [partners[action]]:
            kinds[at] = PAIRED
    return [*kinds, ENDS]
