"""What holds for every legal schedule, tried on random ones of every placement, with slices and split backwards."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeloom.errors import ScheduleError
from pipeloom.ir import COMMUNICATION_OPS, COMPUTE_OPS, Op, Placement, check, dependencies, peer_of
from pipeloom.ir import text as ir_text
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import forward_only, lower
from pipeloom.sim import Costs, Network, Timeline, critical_path, simulate
from tests.pure.handmade import needs_of, relaxed_times, schedules

settings.register_profile("pure", max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pure")

NOT_REPLICATED = (Placement.loop(2), Placement.loop(2, 2), Placement.v(2), Placement.v(3))
MORE_THAN_ONE_RANK = (Placement.loop(3), Placement.loop(2, 2), Placement.v(3), Placement.bidirectional(4))
TIMES = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.5, 3.0])  # sums of these are exact


@st.composite
def costs_for(draw, schedule):
    def times():
        return draw(st.lists(TIMES, min_size=schedule.num_stages, max_size=schedule.num_stages))

    return Costs.per_stage(forward=times(), backward_input=times(), backward_weight=times())


@given(schedules())
def test_every_random_schedule_is_legal_and_stays_so_when_lowered(schedule):
    checked = check(schedule)
    last = schedule.num_stages - 1
    for tied in ((), ((0, last),)) if last else ((),):
        assert check(lower(schedule, tied_stages=tied)).live_activations == checked.live_activations
    check(forward_only(schedule))
    check(lower(forward_only(schedule)))


@given(schedules())
def test_the_dependencies_are_those_of_the_papers(schedule):
    for _, action in schedule.actions():
        needs = dependencies(action, schedule)
        assert set(needs) == needs_of(action, schedule)
        assert len(set(needs)) == len(needs)


@given(schedules(), st.data())
def test_start_times_are_the_earliest_that_all_rules_allow(schedule, data):
    costs = data.draw(costs_for(schedule))
    latency = data.draw(TIMES)
    timeline = simulate(schedule, costs, Network(latency_seconds=latency))
    expected = relaxed_times(schedule, costs.seconds(schedule), latency)
    for row, order in zip(timeline.spans, schedule.orders, strict=True):
        assert tuple(span.action for span in row) == order
        for action, start, end in row:
            assert (start, end) == pytest.approx(expected[action], abs=1e-9)


@given(schedules(), st.data())
def test_lowering_changes_no_computation_in_time(schedule, data):
    costs = data.draw(costs_for(schedule))
    network = Network(latency_seconds=data.draw(TIMES))
    direct, lowered = simulate(schedule, costs, network), simulate(lower(schedule), costs, network)
    assert lowered.compute_spans == direct.compute_spans
    assert lowered.memory == direct.memory
    assert lowered.ideal_seconds == pytest.approx(direct.ideal_seconds)


@given(schedules(), st.data())
def test_no_step_is_shorter_than_its_longest_chain_or_its_busiest_rank(schedule, data):
    costs = data.draw(costs_for(schedule))
    timeline = simulate(schedule, costs)
    seconds = costs.seconds(schedule)
    down_and_up = sum(seconds[Op.F]) + sum(seconds[Op.I]) if schedule.num_slices == 1 else 0.0
    assert timeline.makespan >= max(timeline.busy_seconds) - 1e-9
    assert timeline.makespan >= down_and_up - 1e-9
    assert timeline.makespan >= timeline.span_seconds >= timeline.ideal_seconds - 1e-9
    path = critical_path(timeline)
    assert path[0][1].start == 0.0
    assert path[-1][1].end == timeline.makespan
    assert sum(span.end - span.start for _, span in path) == pytest.approx(timeline.makespan)


@given(schedules())
def test_the_peak_that_is_checked_is_the_peak_of_the_timeline(schedule):
    checked = check(schedule)
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.peak_activations == pytest.approx(checked.peak_activations)
    assert all(points[-1][1] == pytest.approx(0.0) for points in timeline.memory)
    for order, live in zip(schedule.orders, checked.live_activations, strict=True):
        split = {a[:1] + a[2:] for a in order if a.op is Op.I}
        last = {}  # (stage, micro-batch, slice) -> position at which its activation is used for the last time
        for position, a in enumerate(order):
            if a.op is Op.W or (a.op is Op.B and a[:1] + a[2:] not in split):
                last[a[:1] + a[2:]] = position
        first = {a[:1] + a[2:]: position for position, a in enumerate(order) if a.op is Op.F}
        held = [sum(first[k] <= position <= last[k] for k in first) for position in range(len(order))]
        assert live == max(held, default=0)


@given(schedules())
def test_printed_forms_read_back_exactly(schedule):
    assert ir_text.parse_orders(ir_text.format_orders(schedule.orders)) == schedule.orders
    assert ir_text.from_json(ir_text.to_json(schedule)) == schedule
    program = lower(schedule, tied_stages=((0, schedule.num_stages - 1),))
    assert ir_text.parse_orders(ir_text.format_orders(program.orders)) == program.orders


@given(schedules())
def test_a_csv_for_torch_reads_back_exactly_or_is_refused(schedule):
    if schedule.num_slices > 1 or any(len(ranks) > 1 for ranks in schedule.placement.replicas):
        with pytest.raises(ScheduleError, match=r"^[^\n]*torch.distributed.pipelining [^\n]*. Write JSON, or [^\n]*$"):
            to_csv(schedule)
        return
    for pipeline in (schedule, lower(schedule)):
        assert from_csv(to_csv(pipeline), name="random") == schedule
    _check_messages_of_csv(schedule)


def _check_messages_of_csv(schedule):
    """Both ranks of a pair list all their messages, both ways, in one order; a receive stands before its use."""
    rows = [row.split(",") for row in to_csv(lower(schedule)).splitlines()]
    lists = {}
    for rank, row in enumerate(rows):
        seen = set()
        for action in map(ir_text.parse_action, row):
            if action.op in COMMUNICATION_OPS:
                sent = action.op in (Op.SEND_F, Op.SEND_B)
                peer = peer_of(action, schedule.placement)
                name = dependencies(action, lower(schedule))[0] if not sent else action
                lists.setdefault((min(rank, peer), max(rank, peer)), {}).setdefault(rank, []).append(name)
            elif action.op in COMPUTE_OPS:
                for need in dependencies(action, lower(schedule)):
                    assert need in seen, (action, need)
            seen.add(action)
    for both in lists.values():
        one, other = both.values()
        assert one == other


@given(schedules(), st.data())
def test_a_timeline_reads_back_exactly(schedule, data):
    pipeline = lower(schedule) if data.draw(st.booleans()) else schedule
    timeline = simulate(pipeline, Costs.uniform(forward=0.1, backward=0.7), Network(latency_seconds=0.013))
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(schedules(), st.integers(0, 10**6))
def test_dropping_an_action_is_refused(schedule, number):
    rank, position = pick(schedule.orders, number)
    order = schedule.orders[rank]
    action = order[position]
    orders = edited(schedule.orders, rank, (*order[:position], *order[position + 1 :]))
    # Without its I, the W that is left claims a backward that is not split.
    with pytest.raises(
        ScheduleError, match=rf"{action} is missing|is either B, or I and W|B{action.microbatch}.* is missing"
    ):
        check(replace(schedule, orders=orders))


@given(schedules(), st.integers(0, 10**6))
def test_an_action_that_stands_twice_is_refused(schedule, number):
    rank, position = pick(schedule.orders, number)
    order = schedule.orders[rank]
    twice = edited(schedule.orders, rank, (*order[: position + 1], *order[position:]))
    with pytest.raises(ScheduleError, match=f"{order[position]} appears twice"):
        check(replace(schedule, orders=twice))


@given(schedules(placements=MORE_THAN_ONE_RANK), st.integers(0, 10**6))
def test_an_action_on_another_rank_is_refused(schedule, number):
    rank, position = pick(schedule.orders, number)
    order = schedule.orders[rank]
    target = (rank + 1) % schedule.num_ranks
    moved = edited(schedule.orders, rank, (*order[:position], *order[position + 1 :]))
    moved = edited(moved, target, (*moved[target], order[position]))
    with pytest.raises(ScheduleError, match=f"{order[position]} on rank {target}: .* Move it to rank {rank}"):
        check(replace(schedule, orders=moved))


@given(schedules(), st.integers(0, 10**6))
def test_a_backward_before_its_forward_is_refused_as_a_deadlock(schedule, number):
    rank, position = pick(schedule.orders, number)
    order = list(schedule.orders[rank])
    stage, _, microbatch, piece = order[position]
    forward = next(a for a in order if a.op is Op.F and (a.stage, a.microbatch, a.slice) == (stage, microbatch, piece))
    backward = next(
        a for a in order if a.op in (Op.B, Op.I) and (a.stage, a.microbatch, a.slice) == (stage, microbatch, piece)
    )
    order.remove(backward)
    order.insert(order.index(forward), backward)
    with pytest.raises(ScheduleError, match=r"deadlocks: .* waits at .* for ") as caught:
        check(replace(schedule, orders=edited(schedule.orders, rank, tuple(order))))
    assert "\n" not in str(caught.value)


@given(schedules(), st.integers(0, 2**32))
def test_a_shuffled_order_is_legal_or_refused_and_never_hangs(schedule, seed):
    rng = random.Random(seed)
    orders = tuple(tuple(rng.sample(order, len(order))) for order in schedule.orders)
    shuffled = replace(schedule, orders=orders)
    if relaxed_times(shuffled, Costs.uniform(forward=1.0, backward=2.0).seconds(shuffled), 0.0) is None:
        for consumer in (check, lambda s: simulate(s, Costs.uniform())):
            with pytest.raises(ScheduleError, match="deadlocks"):
                consumer(shuffled)
    else:
        check(shuffled)
        check(lower(shuffled))
        assert sum(map(len, simulate(shuffled, Costs.uniform()).spans)) == sum(map(len, orders))


@given(schedules(placements=NOT_REPLICATED), st.data())
def test_two_sends_in_another_order_than_their_receives_are_refused(schedule, data):
    program = lower(schedule)
    for rank, order in enumerate(program.orders):
        pairs = [
            (i, j)
            for i, a in enumerate(order)
            for j, b in enumerate(order)
            if i < j and a.op is b.op is Op.SEND_F and same_peer(a, b, program)
        ]
        if not pairs:
            continue
        i, j = data.draw(st.sampled_from(pairs))
        swapped = list(order)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        with pytest.raises(ScheduleError, match=r"is sent by .* but received as .*: both sides must list"):
            check(replace(program, orders=edited(program.orders, rank, tuple(swapped))))


@given(schedules(placements=MORE_THAN_ONE_RANK), st.integers(0, 10**6))
def test_a_program_without_one_of_its_messages_ends_is_refused(schedule, number):
    program = lower(schedule)
    places = [
        (rank, position)
        for rank, order in enumerate(program.orders)
        for position, action in enumerate(order)
        if action.op not in COMPUTE_OPS and action.microbatch is not None
    ]
    rank, position = places[number % len(places)]
    order = program.orders[rank]
    orders = edited(program.orders, rank, (*order[:position], *order[position + 1 :]))
    with pytest.raises(ScheduleError, match=r"is sent by .* but received as"):
        check(replace(program, orders=orders))


def same_peer(a, b, program) -> bool:
    place = program.placement.rank_of
    return place(a.stage + 1, a.microbatch) == place(b.stage + 1, b.microbatch)


def pick(orders, number: int) -> tuple[int, int]:
    """The rank and position of one action, by its number."""
    places = [(rank, position) for rank, order in enumerate(orders) for position in range(len(order))]
    return places[number % len(places)]


def edited(orders, rank: int, order):
    return (*orders[:rank], tuple(order), *orders[rank + 1 :])
