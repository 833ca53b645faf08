"""Neighbouring I and W become B where no other rank waits for the I, and nowhere else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings

from pipeloom import schedules as families
from pipeloom.ir import Action, Op, Placement, Schedule, check
from pipeloom.ir.text import format_orders, parse_orders
from pipeloom.passes import lower, merge_backwards
from pipeloom.sim import Costs, simulate
from tests.pure.handmade import schedules


def merged(text: str, placement: Placement) -> str:
    orders = parse_orders("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
    count = 1 + max(action.microbatch for order in orders for action in order)
    schedule = Schedule(name="hand", num_microbatches=count, placement=placement, orders=orders)
    check(schedule)
    result = merge_backwards(schedule)
    assert check(result) == check(schedule)
    return format_orders(result.orders)


def test_the_first_stage_merges_and_a_stage_whose_gradient_is_awaited_does_not():
    assert merged("0F0 0F1 0I0 0W0 0I1 0W1\n1F0 1I0 1W0 1F1 1I1 1W1", Placement.loop(2)) == (
        "0F0 0F1 0B0 0B1\n1F0 1I0 1W0 1F1 1I1 1W1\n"
    )


def test_at_the_turn_of_a_v_the_gradient_stays():
    text = """
    0F0 3F0 3I0 3W0 0I0 0W0
    1F0 2F0 2I0 2W0 1I0 1W0
    """
    assert merged(text, Placement.v(2)) == "0F0 3F0 3I0 3W0 0B0\n1F0 2F0 2B0 1I0 1W0\n"


def test_only_neighbours_merge():
    assert merged("0F0 0F1 0I0 0I1 0W0 0W1", Placement.loop(1)) == "0F0 0F1 0I0 0I1 0W0 0W1\n"
    assert merged("0F0 0F1 0I0 0W0 0I1 0W1", Placement.loop(1)) == "0F0 0F1 0B0 0B1\n"


def test_overlapped_pairs_stay():
    orders = ((Action(0, Op.F, 0), Action(0, Op.F, 1), *(Action(0, op, b) for b in (0, 1) for op in (Op.I, Op.W))),)
    pair = frozenset({(Action(0, Op.F, 1), Action(0, Op.I, 0))})
    schedule = Schedule(name="hand", num_microbatches=2, placement=Placement.loop(1), orders=orders, overlapped=pair)
    assert format_orders(merge_backwards(schedule).orders) == "0F0 0F1 0I0 0W0 0B1\n"


def test_without_split_backwards_nothing_is_made():
    schedule = families.one_f_one_b(num_ranks=3, num_microbatches=4)
    assert merge_backwards(schedule) is schedule


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_nothing_waits_longer_and_as_much_is_held(schedule):
    result = merge_backwards(schedule)
    check(lower(result))
    assert check(result) == check(schedule)
    assert merge_backwards(result) is result
    costs = Costs.uniform(forward=1.0, backward_input=1.25, backward_weight=0.75)
    assert simulate(result, costs).makespan <= simulate(schedule, costs).makespan + 1e-9
    assert replace(result, orders=schedule.orders) == schedule
