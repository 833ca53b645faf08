"""Large schedules: the columns say what `dependencies`, the walk and the events say action by action."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule, check, dependencies
from pipeloom.ir.large import columns, rounds
from pipeloom.ir.order import LARGE, Order, decode, encode
from pipeloom.passes import forward_only
from pipeloom.schedules.phases import Phases
from pipeloom.sim import Costs, Network, critical_path, large_schedules, simulate
from pipeloom.sim import simulator as simulator_module
from pipeloom.sim.events import spans_by_events
from tests.pure import handmade

SIZES = [(1, 1), (1, 3), (2, 4), (3, 6), (4, 8), (6, 14)]


def legal_schedules() -> list[Schedule]:
    made = []
    for name, family in schedules.FAMILIES.items():
        for p, m in SIZES if name != "search" else ():
            for chunks in (1, 2, 3, 4) if family.chunks is None else (family.chunks,):
                try:
                    made.append(schedules.build(name, num_ranks=p, num_microbatches=m, num_chunks=chunks))
                except ScheduleError:
                    continue
    rng = random.Random(5)
    for placement in handmade.PLACEMENTS:
        for slices, split in ((1, False), (1, True), (3, True)):
            made.append(handmade.random_schedule(placement, 3, slices, split, rng))
    return made + [forward_only(schedule) for schedule in made[::7]]


LEGAL = legal_schedules()
NAMES = [f"{s.name}-{s.num_ranks}-{s.num_microbatches}-{s.placement.num_chunks}-{s.num_slices}" for s in LEGAL]


def costs_of(schedule: Schedule, seed: int) -> tuple[Costs, Network]:
    rng = random.Random(seed)

    def some(count: int, low: float = 0.1, high: float = 2.0) -> tuple[float, ...]:
        return tuple(rng.uniform(low, high) for _ in range(count))

    stages, ranks = schedule.num_stages, schedule.num_ranks
    kept = some(stages)
    costs = Costs(
        forward=some(stages),
        backward_input=some(stages),
        backward_weight=some(stages),
        overlap=rng.uniform(0.5, 1.0),
        activation_bytes=kept,
        weight_gradient_bytes=tuple(part * rng.random() for part in kept),
        rank_slowness=rng.choice([None, some(ranks)]),
    )
    return costs, Network(latency_seconds=rng.choice([0.0, 0.3, tuple(some(ranks) for _ in range(ranks))]))


@settings(deadline=None, max_examples=150)
@given(handmade.schedules())
def test_columns_of_random_schedules_need_what_the_one_relation_says(schedule):
    columns_equal_the_relation(schedule)


@pytest.mark.parametrize("schedule", LEGAL, ids=NAMES)
def test_columns_need_what_the_one_relation_says(schedule):
    columns_equal_the_relation(schedule)


def columns_equal_the_relation(schedule: Schedule) -> None:
    """`columns.needs` states the relation a second time: for every action it has to be that of `dependencies`."""
    found = columns.columns_of(schedule)
    places = columns._places(schedule, found)
    actions = [action for _, action in schedule.actions()]
    assert [decode(code) for code in found.codes.tolist()] == actions
    needed = {action: set() for action in actions}
    for users, uses in columns.needs(schedule, *places):
        for user, used in zip(users.tolist(), uses.tolist(), strict=True):
            assert actions[used] not in needed[actions[user]]
            needed[actions[user]].add(actions[used])
    assert needed == {action: set(dependencies(action, schedule)) for action in actions}


@settings(deadline=None, max_examples=100)
@given(handmade.schedules(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_guessed_rounds_are_those_walked_one_by_one(schedule, steps, fewest, more):
    """Small numbers, so that short schedules have guesses that are right, wrong from the start, and wrong inside."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rounds, "_STEPS", steps)
        patched.setattr(rounds, "_GUESSES", (fewest, fewest + more))
        guessed = columns.prove.__wrapped__(schedule)
        patched.setattr(rounds._Walk, "guess", lambda walk, num_rounds: 0)
        stepped = columns.prove.__wrapped__(schedule)
    if stepped is None:
        assert guessed is None
    else:
        assert guessed.rounds == stepped.rounds
        assert (guessed.sequence == stepped.sequence).all()


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipev"])
def test_most_rounds_of_a_long_schedule_are_guessed(name, monkeypatch):
    schedule = schedules.build(name, num_ranks=20, num_microbatches=400)
    monkeypatch.setattr(rounds, "_NARROW", 1)
    guessed, guess, walked = columns.prove.__wrapped__(schedule), rounds._Walk.guess, []
    monkeypatch.setattr(rounds._Walk, "guess", lambda *given: walked.append(guess(*given)) or walked[-1])
    columns.prove.__wrapped__(schedule)
    monkeypatch.setattr(rounds._Walk, "guess", lambda *given: 0)
    stepped = columns.prove.__wrapped__(schedule)
    assert sum(walked) > len(stepped.rounds) / 2
    assert guessed.rounds == stepped.rounds
    assert (guessed.sequence == stepped.sequence).all()


@pytest.mark.parametrize(
    ("schedule", "single"),
    [
        pytest.param(
            schedule, single, id=f"{name}-{single}", marks=() if turn % 2 == single else pytest.mark.whole_grid
        )
        for turn, (schedule, name) in enumerate(zip(LEGAL, NAMES, strict=True))
        for single in (False, True)
    ],
)
def test_times_and_memory_by_columns_are_those_by_events(schedule, single, monkeypatch):
    """Alternately in rounds and one action at a time."""
    monkeypatch.setattr(large_schedules, "_WIDE", 1 << 30 if single else 0)
    if single:
        monkeypatch.setattr(rounds, "_TRIAL", 1)
        monkeypatch.setattr(rounds, "_STEPS", 1)
        monkeypatch.setattr(rounds._Walk, "guess", lambda walk, num_rounds: 0)
        monkeypatch.setattr(rounds, "_NARROW", 1 << 30)
    proof = columns.prove.__wrapped__(schedule)
    assert (proof.rounds is None) == single or len(proof.columns.codes) <= schedule.num_ranks
    assert proof.live == check(schedule).live_activations
    for seed in range(2):
        costs, network = costs_of(schedule, seed)
        timeline, by_events = (
            simulator_module._timed_by_rounds(schedule, proof, costs, network),
            simulate(schedule, costs, network),
        )
        assert replace(timeline, ideal_seconds=by_events.ideal_seconds) == by_events
        assert timeline.ideal_seconds == pytest.approx(by_events.ideal_seconds, rel=1e-12)
        assert timeline.busy_seconds == pytest.approx(by_events.busy_seconds, rel=1e-12)
        for what in ("makespan", "span_seconds", "peak_activations", "peak_bytes", "schedule", "latency_seconds"):
            assert getattr(timeline, what) == getattr(by_events, what), what
        assert critical_path(timeline) == critical_path(by_events)
        assert type(timeline).from_json(timeline.to_json()) == timeline


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(LEGAL), st.integers(0, 2**32))
def test_the_verdict_on_changed_schedules_is_that_of_the_walk(schedule, seed):
    rng = random.Random(seed)
    orders = [list(order) for order in schedule.orders]
    for _ in range(rng.choice((1, 1, 2))):
        rank = rng.randrange(len(orders))
        if not orders[rank]:
            continue
        at, to = rng.randrange(len(orders[rank])), rng.randrange(len(orders[rank]))
        kind = rng.choice(("swap", "move", "drop", "twice", "other rank", "op", "stage", "micro-batch", "slice"))
        action = orders[rank][at]
        if kind == "swap":
            orders[rank][at], orders[rank][to] = orders[rank][to], action
        elif kind == "move":
            orders[rank].insert(to, orders[rank].pop(at))
        elif kind == "drop":
            orders[rank].pop(at)
        elif kind == "twice":
            orders[rank].insert(to, action)
        elif kind == "other rank":
            orders[rng.randrange(len(orders))].append(orders[rank].pop(at))
        elif kind == "op":
            orders[rank][at] = action.with_op(rng.choice([*Op]))
        elif kind == "stage":
            orders[rank][at] = action._replace(stage=rng.randrange(-1, schedule.num_stages + 1))
        elif kind == "micro-batch":
            orders[rank][at] = action._replace(microbatch=rng.choice([None, -1, 0, 1, schedule.num_microbatches]))
        else:
            orders[rank][at] = action._replace(slice=rng.choice([None, -1, 0, 1, 3]))
    overlapped = schedule.overlapped
    if overlapped and rng.random() < 0.3:
        first, second = rng.choice(sorted(overlapped))
        overlapped = (overlapped - {(first, second)}) | {(rng.choice(orders[0]), second)} if orders[0] else overlapped
    changed = replace(schedule, orders=tuple(map(tuple, orders)), overlapped=overlapped)
    try:
        expected = check(changed).live_activations
    except ScheduleError:
        assert columns.prove(changed) is None
    else:
        assert columns.prove(changed).live == expected


def test_a_large_schedule_answers_like_a_small_one_and_is_refused_with_the_same_words():
    number = LARGE // 4  # twice as many actions as make a schedule large
    large = schedules.one_f_one_b(num_ranks=4, num_microbatches=number)
    assert isinstance(large.orders[0], Order)
    plain = replace(large, orders=tuple(map(tuple, large.orders)))
    assert (plain, hash(plain.orders)) == (large, hash(large.orders))
    assert check(plain) == check(large)
    assert check(large).live_activations == (4, 3, 2, 1)
    timeline = simulate(large, Costs.uniform())
    assert timeline.makespan == (number + 3) * 3
    assert timeline.spans[3][0] == (Action(3, Op.F, 0), 3.0, 4.0)
    assert timeline.spans[3][:2] == tuple(timeline.spans[3])[:2]
    assert (timeline.memory[3][0], timeline.memory[3][-1]) == ((0.0, 0.0), (timeline.spans[3][-1].end, 0.0))
    orders = [list(order) for order in large.orders]
    orders[3][0], orders[3][1] = orders[3][1], orders[3][0]
    for pipeline in (
        replace(large, orders=tuple(map(tuple, orders))),
        replace(large, orders=tuple(map(codes, orders))),
    ):
        for consumer in (check, lambda s: simulate(s, Costs.uniform())):
            with pytest.raises(ScheduleError, match=r"'1f1b' deadlocks: .*rank 3 waits at 3B0 for 3F0"):
                consumer(pipeline)
    with pytest.raises(ScheduleError, match=f"3B{number - 1} is missing"):
        check(replace(large, orders=(*large.orders[:3], large.orders[3][:-1])))


def codes(order: list[Action]) -> Order:
    return Order(map(encode, order))


def test_what_does_not_fit_into_an_integer_is_refused():
    for action in (
        Action(-1, Op.F, 0),
        Action(1 << 20, Op.F, 0),
        Action(0, Op.F, 1 << 22),
        Action(0, Op.F, 0, 1 << 16),
    ):
        with pytest.raises(ScheduleError, match="Use smaller sizes"):
            encode(action)
    with pytest.raises(ScheduleError, match="Use smaller sizes"):
        schedules.gpipe(num_ranks=1, num_microbatches=5_000_000)


@given(
    st.builds(
        Action,
        st.integers(0, (1 << 20) - 1),
        st.sampled_from(Op),
        st.none() | st.integers(0, (1 << 22) - 2),
        st.none() | st.integers(0, (1 << 16) - 2),
    )
)
def test_an_action_is_an_integer_and_back(action):
    assert decode(encode(action)) == action
    assert np.array([encode(action)], np.int64)[0] >= 0


def test_phases_count_up_each_stage_and_op():
    lane = Phases()
    lane.repeat(2, (0, Op.F))
    lane.repeat(0, (0, Op.F), (0, Op.B))
    lane.repeat(2, (0, Op.F), (0, Op.B))
    lane.repeat(-1, (0, Op.B))
    assert " ".join(map(str, lane.order())) == "0F0 0F1 0F2 0B0 0F3 0B1"
    assert " ".join(map(str, lane.order(2))) == "0F0 0F1 0B0 0B1"


def test_a_rank_without_actions_stays_empty():
    placement = Placement.replicated([1, 2])
    orders = ((Action(0, Op.F, 0), Action(0, Op.B, 0)), (Action(1, Op.F, 0), Action(1, Op.B, 0)), ())
    schedule = Schedule(name="hand", num_microbatches=1, placement=placement, orders=orders)
    proof = columns.prove(schedule)
    assert proof.live == check(schedule).live_activations == (1, 1, 0)
    rows = large_schedules.spans_by_rounds(schedule, proof, Costs.uniform(), Network())
    assert list(map(list, rows)) == spans_by_events(schedule, Costs.uniform(), Network()).spans
