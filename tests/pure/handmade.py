"""Schedules made by hand and by chance, and a second statement of what an action waits for, for the tests to compare.

The relation is written out here again, from the papers, so that a slip in the library's one cannot hide.
"""

from __future__ import annotations

import itertools
import random

from hypothesis import strategies as st

from pipeloom.ir import Action, Op, Placement, Schedule

F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


def needs_of(action: Action, schedule: Schedule) -> set[Action]:
    """What `action` waits for in a schedule, beside its own rank: Appendix-style, rule by rule."""
    split = {(a.stage, a.microbatch, a.slice) for order in schedule.orders for a in order if a.op is I}
    last_stage, last_slice = schedule.num_stages - 1, schedule.num_slices - 1
    stage, op, b, q = action

    def gradient(s: int, piece: int | None) -> Action:
        return Action(s, I if (s, b, piece) in split else B, b, piece)

    if op is F:
        found = {Action(stage - 1, F, b, q)} if stage > 0 else set()
        if q is not None and q > 0:
            found.add(Action(stage, F, b, q - 1))
        return found
    if op is W:
        return {Action(stage, I, b, q)}
    found = {Action(stage, F, b, q)}
    if stage < last_stage:
        found.add(gradient(stage + 1, q))
    if q is not None and q < last_slice:
        found.add(gradient(stage, q + 1))
    return found


def random_schedule(
    placement: Placement, num_microbatches: int, num_slices: int, split: bool, rng: random.Random
) -> Schedule:
    """A legal schedule: again and again one of the actions that are ready goes to the end of its rank's order."""
    pieces = [None] if num_slices == 1 else list(range(num_slices))
    actions = []
    for stage in range(placement.num_stages):
        for b in range(num_microbatches):
            for q in pieces:
                backward = (I, W) if split and rng.random() < 0.5 else (B,)
                actions += [Action(stage, op, b, q) for op in (F, *backward)]
    whole = Schedule(
        name="random",
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        placement=placement,
        orders=(tuple(actions),),
    )
    missing = {action: needs_of(action, whole) for action in actions}
    orders: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    while missing:
        action = rng.choice(sorted(action for action, needs in missing.items() if not needs))
        orders[placement.rank_of(action.stage, action.microbatch)].append(action)
        del missing[action]
        for needs in missing.values():
            needs.discard(action)
    return Schedule(
        name="random",
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        placement=placement,
        orders=tuple(map(tuple, orders)),
    )


PLACEMENTS = (
    Placement.loop(1),
    Placement.loop(3),
    Placement.loop(2, 2),
    Placement.loop(1, 3),
    Placement.v(2),
    Placement.v(3),
    Placement.bidirectional(2),
    Placement.bidirectional(4),
    Placement.replicated([2, 1]),
    Placement.replicated([1, 2, 2]),
)


@st.composite
def schedules(draw: st.DrawFn, placements: tuple[Placement, ...] = PLACEMENTS, max_slices: int = 3) -> Schedule:
    """Random legal schedules on every kind of placement, with slices and split backwards."""
    placement = draw(st.sampled_from(placements))
    replicas = max(map(len, placement.replicas))
    return random_schedule(
        placement,
        draw(st.integers(replicas, 4)),
        draw(st.integers(1, max_slices)),
        draw(st.booleans()),
        random.Random(draw(st.integers(0, 2**32))),
    )


def relaxed_times(
    schedule: Schedule, seconds: dict[Op, tuple[float, ...]], latency: float
) -> dict[Action, tuple[float, float]] | None:
    """Start and end of every action by relaxing all constraints until nothing moves: slow, and plainly right.

    None where that never ends: some actions, all of which take time, wait for each other in a circle.
    """
    bound = sum(seconds[a.op][a.stage] + latency for _, a in schedule.actions())
    home = {action: rank for rank, action in schedule.actions()}
    before = {second: first for order in schedule.orders for first, second in itertools.pairwise(order)}
    start = dict.fromkeys(home, 0.0)
    moved = True
    while moved:
        moved = False
        for action in home:
            earliest = 0.0
            if action in before:
                first = before[action]
                earliest = start[first] + seconds[first.op][first.stage]
            for need in needs_of(action, schedule):
                arrives = start[need] + seconds[need.op][need.stage]
                earliest = max(earliest, arrives + (latency if home[need] != home[action] else 0.0))
            if earliest > bound:
                return None
            if earliest > start[action]:
                start[action], moved = earliest, True
    return {action: (at, at + seconds[action.op][action.stage]) for action, at in start.items()}
