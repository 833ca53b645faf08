"""Activations that leave the device: which, when, what is refused, and what the moves take."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeloom import schedules as families
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import COMPUTE_OPS, Action, DataAxis, DataStrategy, Granularity, Op, Program, check, live_activations
from pipeloom.ir.text import format_orders, parse_orders
from pipeloom.ir.torch_csv import to_csv
from pipeloom.passes import forward_only, insert_communication, insert_offload, lower
from pipeloom.sim import Costs, Network, simulate
from tests.pure.handmade import schedules

GPIPE = lower(families.build("gpipe", num_ranks=1, num_microbatches=6))


def test_those_leave_that_are_used_last_and_come_back_one_computation_early():
    """At 0F4 and 0F5 two of the first four have to be away, whose moves then have ended; 2 and 3 are used last."""
    assert format_orders(insert_offload(GPIPE, 4).orders) == (
        "0F0 0F1 0F2 0OFFLOAD2 0F3 0OFFLOAD3 0F4 0F5 0B0 0RELOAD2 0B1 0RELOAD3 0B2 0B3 0B4 0B5\n"
    )
    assert format_orders(insert_offload(GPIPE, 4, beside=0).orders) == (
        "0F0 0F1 0F2 0F3 0OFFLOAD3 0F4 0OFFLOAD4 0F5 0B0 0B1 0B2 0RELOAD3 0B3 0RELOAD4 0B4 0B5\n"
    )


def held(program: Program, rank: int, beside: int, sizes: tuple[float, ...]) -> float:
    """The most that a rank holds if every move takes the time of `beside` computations: told action by action."""
    clock, live, most = 0, 0.0, 0.0
    leaving: list[tuple[int, float]] = []
    split = program.schedule.split_backwards
    seconds = set(program.schedule.partners.values())
    for action in program.orders[rank]:
        size = sizes[action.stage]
        for at, gone in [each for each in leaving if each[0] <= clock]:
            live -= gone
            leaving.remove((at, gone))
        clock += action.op in COMPUTE_OPS and action not in seconds
        if action.op in (Op.F, Op.RELOAD):
            live += size
        elif action.op is Op.OFFLOAD:
            leaving.append((clock + beside, size))
        most = max(most, live)
        if action.op is Op.W or (action.op is Op.B and (action.stage, *action[2:]) not in split):
            live -= size
    return most


@given(schedules(), st.integers(0, 2), st.integers(0, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_cap_holds_on_random_schedules_or_the_least_is_named(schedule, beside, cap, sized):
    program = insert_communication(schedule)
    sizes = tuple(1.0 + stage % 3 if sized else 1.0 for stage in range(schedule.num_stages))
    try:
        moved = insert_offload(program, cap, sizes=sizes if sized else None, beside=beside)
    except InputError as error:
        least = float(str(error).split("needs ")[1].split(". Raise")[0])
        assert least > cap
        rank = int(str(error).split()[1])
        caps = [1e9] * program.num_ranks
        caps[rank] = least
        moved = insert_offload(program, caps, sizes=sizes, beside=beside)
        check(moved)
        assert held(moved, rank, beside, sizes) <= least
        return
    check(moved)
    assert [[a for a in order if a.op in COMPUTE_OPS] for order in moved.orders] == [*map(list, schedule.orders)]
    for rank in range(program.num_ranks):
        assert held(moved, rank, beside, sizes) <= cap
        assert sized or live_activations(moved)[rank] <= cap
    counts = Counter(action.op for _, action in moved.actions())
    assert counts[Op.OFFLOAD] == counts[Op.RELOAD]


@given(schedules(), st.integers(0, 1), st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_choice_of_fewer_moves_keeps_the_cap(schedule, beside, cap):
    """All subsets of the forwards of a small rank, each moved by hand."""
    program = insert_communication(schedule)
    order = next((o for o in program.orders if 0 < sum(a.op is Op.F for a in o) <= 6), None)
    if order is None:
        return
    rank = program.orders.index(order)
    caps = [1e9] * program.num_ranks
    caps[rank] = cap
    everything = insert_offload(program, [1e9] * program.num_ranks)
    try:
        moved = insert_offload(program, caps, beside=beside)
    except InputError:
        return
    needed = sum(action.op is Op.OFFLOAD for action in moved.orders[rank])
    forwards = [action for action in order if action.op is Op.F]
    for fewer in itertools.combinations(forwards, max(0, needed - 1)):
        if needed == 0:
            break
        by_hand = _moved_by_hand(everything, rank, set(fewer), beside)
        assert by_hand is None or held(by_hand, rank, beside, (1.0,) * schedule.num_stages) > cap


def _moved_by_hand(program: Program, rank: int, chosen: set[Action], beside: int) -> Program | None:
    """`program` with just these moves; None where one has no time for its way out and back."""
    order = list(program.orders[rank])
    seconds = set(program.schedule.partners.values())
    clock, time = 0, {}
    for action in order:
        if action.op in COMPUTE_OPS:
            clock += action not in seconds
            time[action] = clock
    result: list[Action] = []
    for action in order:
        if action.op in COMPUTE_OPS and action not in seconds:
            partner = program.schedule.partners.get(action)
            for forward in chosen:
                used = next(a for a in time if a.op in (Op.B, Op.I) and a[::2] == forward[::2] and a[3] == forward[3])
                if time[used] - beside <= time[forward] + beside:
                    return None
                if time[used] - beside == time[action]:
                    result.append(forward.with_op(Op.RELOAD))
            result.append(action)
            if partner is None and action in chosen:
                result.append(action.with_op(Op.OFFLOAD))
        else:
            result.append(action)
            first = next((f for f, b in program.schedule.overlapped if b == action), None)
            if first in chosen:
                result.append(first.with_op(Op.OFFLOAD))
    orders = (*program.orders[:rank], tuple(result), *program.orders[rank + 1 :])
    return replace(program, orders=orders)


def test_less_than_one_that_moves_and_one_that_computes_is_refused():
    with pytest.raises(
        InputError, match=r"rank 0 of 'gpipe' has a cap of 1 on activations: .* needs 3\. Raise the cap"
    ):
        insert_offload(GPIPE, 1)
    assert live_activations(insert_offload(GPIPE, 1, beside=0)) == (1,)
    with pytest.raises(InputError, match="3 caps for 1 ranks"):
        insert_offload(GPIPE, (1, 2, 3))


def test_it_works_beside_a_data_axis_and_leaves_evaluations_alone():
    schedule = families.build("interleaved", num_ranks=2, num_microbatches=8)
    for granularity in Granularity:
        data = DataAxis(degree=2, strategy=DataStrategy.ZERO3, granularity=granularity)
        moved = insert_offload(lower(schedule, data=data), 4)
        check(moved)
        assert max(live_activations(moved)) <= 4 < max(live_activations(schedule))
    evaluation = lower(forward_only(schedule))
    assert insert_offload(evaluation, 1) is evaluation
    with pytest.raises(ScheduleError, match="does not offload activations"):
        to_csv(insert_offload(lower(schedule), 4))


def test_moves_that_make_no_sense_are_refused():
    moved = insert_offload(GPIPE, 4)
    text = format_orders(moved.orders)
    assert "0OFFLOAD3" in text
    for old, new, said in (
        ("0OFFLOAD3 ", "", "0RELOAD3 on rank 0, where nothing is offloaded"),
        ("0RELOAD3 ", "", "0B3 on rank 0, where its activation is offloaded: .*Put 0RELOAD3 before it"),
        ("0F3 0OFFLOAD3", "0OFFLOAD3 0F3", "0OFFLOAD3 on rank 0, where no activation is kept: .*Put it behind 0F3"),
        ("0RELOAD3 ", "0RELOAD3 0OFFLOAD3 ", "0OFFLOAD3 appears twice on rank 0: .* at most once"),
        ("0OFFLOAD2 ", "0OFFLOAD ", "0OFFLOAD on rank 0, where no activation is kept"),
    ):
        assert old in text
        with pytest.raises(ScheduleError, match=said):
            check(replace(moved, orders=parse_orders(text.replace(old, new))))


def costs(**more) -> Costs:
    return Costs(forward=(1.0,), backward_input=(1.0,), backward_weight=(1.0,), **more)


def test_moves_take_their_bytes_over_the_memory_link_beside_the_computations():
    """F takes 1 s, B 2 s; an activation has 6 bytes, the link 4 a second: a move takes 1.5 s."""
    orders = parse_orders("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0RELOAD1 0RELOAD0 0B1 0B0\n")
    schedule = families.from_orders("0F0 0F1 0F2 0B2 0B1 0B0")
    program = replace(lower(schedule), orders=orders)
    check(program)
    timeline = simulate(program, costs(activation_bytes=(6.0,)), Network(memory_bytes_per_second=4.0))
    assert [(str(a), start, end) for a, start, end in timeline.background[0]] == [
        ("0OFFLOAD0", 1.0, 2.5),
        ("0OFFLOAD1", 2.5, 4.0),
        ("0RELOAD1", 5.0, 6.5),
        ("0RELOAD0", 6.5, 8.0),
    ]
    starts = {str(span.action): span.start for span in timeline.spans[0]}
    assert [starts[a] for a in ("0F2", "0B2", "0B1", "0B0")] == [2.0, 3.0, 6.5, 8.5]
    assert timeline.makespan == 10.5
    # 3 live from 0F2 to the end of the first move; bytes alike
    assert timeline.memory[0] == (
        (0.0, 0.0),
        (0.0, 1.0),
        (1.0, 2.0),
        (2.0, 3.0),
        (2.5, 2.0),
        (4.0, 1.0),
        (5.0, 0.0),
        (5.0, 1.0),
        (6.5, 2.0),
        (8.5, 1.0),
        (10.5, 0.0),
    )
    assert timeline.peak_bytes == (18.0,)
    with pytest.raises(InputError, match="no activation_bytes"):
        simulate(program, costs(), Network(memory_bytes_per_second=4.0))
    assert simulate(program, costs()).makespan == 9.0  # a link without a limit


def test_a_fast_link_costs_no_time_and_holds_the_cap_in_the_simulation():
    schedule = families.build("1f1b", num_ranks=4, num_microbatches=16)
    sizes = dict.fromkeys(("activation_bytes",), (4.0,) * 4)
    whole = Costs(forward=(1.0,) * 4, backward_input=(1.0,) * 4, backward_weight=(1.0,) * 4, **sizes)
    program = insert_offload(lower(schedule), 3)
    check(program)
    timeline = simulate(program, whole, Network(memory_bytes_per_second=4.0))  # a move as long as a forward
    assert timeline.makespan == simulate(schedule, whole).makespan
    assert max(timeline.peak_activations) <= 3 < max(simulate(schedule, whole).peak_activations)
