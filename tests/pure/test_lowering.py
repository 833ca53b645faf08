"""The passes: where sends, receives and gradient reductions go."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pipeloom import schedules
from pipeloom.ir import COMPUTE_OPS, Action, Op, Placement, Schedule, check, peer_of
from pipeloom.ir.text import format_orders, parse_orders
from pipeloom.passes import forward_only, insert_communication, insert_gradient_reduction, lower, separate_units
from pipeloom.sim import Costs, simulate


def by_hand(text: str, placement: Placement) -> Schedule:
    orders = parse_orders("\n".join(line.strip() for line in text.strip().splitlines()) + "\n")
    return Schedule(
        name="hand",
        num_microbatches=1 + max(a.microbatch for order in orders for a in order),
        placement=placement,
        orders=orders,
    )


def lowered_text(schedule: Schedule) -> str:
    check(schedule)
    program = lower(schedule)
    check(program)
    return format_orders(program.orders)


def test_gpipe_on_two_ranks():
    assert lowered_text(schedules.gpipe(num_ranks=2, num_microbatches=2)) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1\n"
    )


def test_one_rank_needs_no_messages():
    for text, placement in (
        ("0F0 0B0 0F1 0B1", Placement.loop(1)),
        ("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", Placement.loop(1, 2)),
    ):
        schedule = by_hand(text, placement)
        assert lower(schedule).orders == schedule.orders


def test_split_backwards_send_after_the_input_gradient_and_not_after_the_weights():
    assert (
        lowered_text(by_hand("0F0 0I0 0W0\n1F0 1I0 1W0", Placement.loop(2)))
        == "0F0 0SEND_F0 0RECV_B0 0I0 0W0\n1RECV_F0 1F0 1I0 1SEND_B0 1W0\n"
    )


def test_a_v_placement_sends_nothing_at_its_turn():
    schedule = by_hand(
        """
        0F0 3F0 3B0 0B0
        1F0 2F0 2B0 1B0
        """,
        Placement.v(2),
    )
    assert lowered_text(schedule) == (
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0\n1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0\n"
    )


def test_interleaved_chunks_wrap_around_from_the_last_rank_to_the_first():
    schedule = by_hand(
        """
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
        """,
        Placement.loop(2, 2),
    )
    program = lower(schedule)
    check(program)
    assert Action(1, Op.SEND_F, 0) in program.orders[1]
    assert Action(2, Op.RECV_F, 0) in program.orders[0]
    assert peer_of(Action(1, Op.SEND_F, 0), program.placement) == 0
    # both directions share a pair of ranks: activations of chunk 1 and gradients of chunk 0 go from rank 1 to rank 0
    sent = [a for a in program.orders[1] if a.op in (Op.SEND_F, Op.SEND_B)]
    assert [str(a) for a in sent[:4]] == ["1SEND_F0", "1SEND_F1", "3SEND_B0", "3SEND_B1"]


def test_a_message_that_is_needed_second_but_sent_first_is_received_first():
    """Rank 1 sends the gradient of micro-batch 0 before that of 1; rank 0 wants them the other way round."""
    schedule = by_hand("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", Placement.loop(2))
    assert lowered_text(schedule).splitlines()[0] == ("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B1 0B0")


def test_bidirectional_pipelines_run_even_micro_batches_down_and_odd_ones_up():
    schedule = by_hand("0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1", Placement.bidirectional(2))
    program = lower(schedule)
    check(program)
    assert format_orders(program.orders) == (
        "0F0 0SEND_F0 1RECV_F1 1F1 1B1 1SEND_B1 0RECV_B0 0B0 0REDUCE_GRAD 1REDUCE_GRAD\n"
        "0F1 0SEND_F1 1RECV_F0 1F0 1B0 1SEND_B0 0RECV_B1 0B1 0REDUCE_GRAD 1REDUCE_GRAD\n"
    )
    assert program.gradient_groups == ((0,), (1,))
    assert program.ranks_of_group((0,)) == (0, 1)


def test_replicas_share_the_micro_batches_and_sum_their_gradients():
    schedule = by_hand("0F0 0B0 0F2 0B2\n0F1 0B1\n1F0 1B0 1F1 1B1 1F2 1B2", Placement.replicated([2, 1]))
    program = lower(schedule)
    check(program)
    assert program.orders[0][-1] == program.orders[1][-1] == Action(0, Op.REDUCE_GRAD)
    assert all(action.op is not Op.REDUCE_GRAD for action in program.orders[2])
    assert peer_of(Action(1, Op.SEND_B, 1), program.placement) == 1
    assert peer_of(Action(1, Op.SEND_B, 2), program.placement) == 0


def test_tied_stages_meet_once_after_the_last_backward():
    schedule = schedules.one_f_one_b(num_ranks=3, num_microbatches=2)
    program = lower(schedule, tied_stages=((0, 2),))
    check(program)
    assert [order[-1] for order in program.orders] == [
        Action(0, Op.REDUCE_GRAD),
        Action(1, Op.SEND_B, 1),
        Action(2, Op.REDUCE_GRAD),
    ]
    assert program.ranks_of_group((0, 2)) == (0, 2)


def test_groups_that_touch_become_one():
    program = insert_communication(schedules.gpipe(num_ranks=4, num_microbatches=1))
    reduced = insert_gradient_reduction(program, ((0, 1), (2, 3), (1, 3)))
    assert reduced.gradient_groups == ((0, 1, 2, 3),)
    check(reduced)


def test_stages_tied_on_one_rank_need_no_reduction():
    schedule = by_hand("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0", Placement.v(2))
    program = lower(schedule, tied_stages=((0, 3),))
    assert program.gradient_groups == ()
    assert all(action.op is not Op.REDUCE_GRAD for _, action in program.actions())


def test_evaluation_keeps_the_forwards_and_nothing_else():
    schedule = forward_only(schedules.one_f_one_b(num_ranks=2, num_microbatches=3))
    checked = check(schedule)
    assert checked.live_activations == (1, 1)
    program = lower(schedule, tied_stages=((0, 1),))
    check(program)
    assert format_orders(program.orders) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2\n1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2\n"
    )


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_lowering_changes_no_order_of_computations(name):
    schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
    program = lower(schedule)
    assert tuple(tuple(a for a in order if a.op in COMPUTE_OPS) for order in program.orders) == schedule.orders


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_separate_units_wait_for_no_message_too_early_and_send_none_too_late(name):
    """F of a unit starts without the message for its B, and its result leaves before B; the step gets no longer."""
    schedule = schedules.build(name, num_ranks=4, num_microbatches=10)
    program, separate = lower(schedule), lower(separate_units(schedule))
    assert separate_units(separate.schedule) is separate.schedule
    assert check(separate).live_activations == check(program).live_activations
    late = early = 0
    for order, ran in zip(program.orders, separate.orders, strict=True):
        assert sorted(ran) == sorted(order)
        assert [a for a in ran if a.op in COMPUTE_OPS] == [a for a in order if a.op in COMPUTE_OPS]
        position = {action: k for k, action in enumerate(ran)}
        for forward, backward in schedule.overlapped & set(pairwise(order)):
            between = ran[position[forward] + 1 : position[backward]]
            early += forward.with_op(Op.SEND_F) in between
            late += backward.with_op(Op.RECV_B) in between
            assert position.get(forward.with_op(Op.SEND_F), -1) < position[backward]
    assert early > 10
    assert late > 10
    costs = Costs.uniform(backward=2.0)
    assert simulate(separate, costs).makespan <= simulate(program, costs).makespan
