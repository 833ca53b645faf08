"""Actions, placements, their printed forms, and what the checker refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import (
    Action,
    DataAxis,
    DataStrategy,
    Op,
    Placement,
    Program,
    Schedule,
    Skip,
    WeightPolicy,
    check,
    dependencies,
    dependency_order,
)
from pipeloom.ir import text as ir_text
from pipeloom.ir.torch_csv import from_csv
from pipeloom.passes import insert_offload, lower
from pipeloom.sim import Costs, simulate
from tests.pure.handmade import B, F, I, W


def schedule_of(text: str, placement: Placement | None = None, **kwargs) -> Schedule:
    orders = ir_text.parse_orders(text)
    return Schedule(
        name="hand",
        num_microbatches=1 + max(a.microbatch for order in orders for a in order),
        placement=placement or Placement.loop(len(orders)),
        orders=orders,
        **kwargs,
    )


def test_an_action_prints_in_its_standard_form_and_reads_back():
    assert str(Action(2, F, 0)) == "2F0"
    assert str(Action(2, F, 0, 3)) == "2F0.3"
    assert str(Action(11, Op.SEND_F, 12)) == "11SEND_F12"
    assert str(Action(1, Op.REDUCE_GRAD)) == "1REDUCE_GRAD"
    for op in Op:
        for action in (Action(3, op), Action(3, op, 14), Action(3, op, 14, 2)):
            assert ir_text.parse_action(str(action)) == action


@pytest.mark.parametrize("text", ["", "F0", "1X0", "1F", "-1F0", "1F0.", "1F0.1.1", "1f0", "1 F0"])
def test_a_word_that_is_no_action_is_refused_or_has_no_micro_batch(text):
    if text == "1F":
        assert ir_text.parse_action(text).microbatch is None
        return
    with pytest.raises(ScheduleError, match=r": an action is stage, op, micro-batch and slice\. Write"):
        ir_text.parse_action(text)


def test_placements():
    assert Placement.loop(2, 2).replicas == ((0,), (1,), (0,), (1,))
    assert Placement.v(3).replicas == ((0,), (1,), (2,), (2,), (1,), (0,))
    assert Placement.bidirectional(4).replicas == ((0, 3), (1, 2), (2, 1), (3, 0))
    assert Placement.replicated([2, 1]).replicas == ((0, 1), (2,))
    assert Placement.loop(2, 3).stages_of == ((0, 2, 4), (1, 3, 5))
    assert Placement.v(2).num_chunks == 2
    assert [Placement.replicated([2, 1]).rank_of(0, b) for b in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("replicas", [(), ((),), ((0,), (2,)), ((0, 0), (1,)), ((1,), (2,))])
def test_impossible_placements_are_refused(replicas):
    with pytest.raises(ScheduleError):
        Placement(replicas)


def test_a_bidirectional_placement_needs_an_even_number_of_ranks():
    with pytest.raises(ScheduleError, match="even"):
        Placement.bidirectional(3)


def test_dependencies_of_a_split_and_sliced_schedule():
    schedule = schedule_of("0F0.0 0F0.1 0I0.1 0I0.0 0W0.1 0W0.0\n1F0.0 1F0.1 1B0.1 1B0.0\n", num_slices=2)
    assert set(dependencies(Action(1, F, 0, 1), schedule)) == {Action(0, F, 0, 1), Action(1, F, 0, 0)}
    assert set(dependencies(Action(1, B, 0, 0), schedule)) == {Action(1, F, 0, 0), Action(1, B, 0, 1)}
    assert set(dependencies(Action(0, I, 0, 0), schedule)) == {
        Action(0, F, 0, 0),
        Action(1, B, 0, 0),
        Action(0, I, 0, 1),
    }
    assert set(dependencies(Action(0, W, 0, 0), schedule)) == {Action(0, I, 0, 0)}
    check(schedule)


def test_dependencies_of_a_program_go_through_its_messages():
    program = lower(schedules.gpipe(num_ranks=2, num_microbatches=1))
    assert dependencies(Action(1, F, 0), program) == (Action(1, Op.RECV_F, 0),)
    assert dependencies(Action(1, Op.RECV_F, 0), program) == (Action(0, Op.SEND_F, 0),)
    assert dependencies(Action(0, Op.SEND_F, 0), program) == (Action(0, F, 0),)
    assert set(dependencies(Action(0, B, 0), program)) == {Action(0, F, 0), Action(0, Op.RECV_B, 0)}
    assert dependencies(Action(1, Op.SEND_B, 0), program) == (Action(1, B, 0),)


def test_dependency_order_yields_each_rank_in_its_own_order():
    program = lower(schedules.one_f_one_b(num_ranks=3, num_microbatches=5))
    seen: list[list[Action]] = [[] for _ in program.orders]
    for rank, position, action in dependency_order(program):
        assert position == len(seen[rank])
        seen[rank].append(action)
    assert tuple(map(tuple, seen)) == program.orders


GOOD = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1\n", "0B1 is missing: every stage runs every micro-batch.*Add it to rank 0"),
        ("0F0 0F1 0B0 0B1 0B1\n1F0 1B0 1F1 1B1\n", "0B1 appears twice on rank 0.*exactly once.*Remove one"),
        ("0F0 0F1 0B0 0B1 1B1\n1F0 1B0 1F1\n", "1B1 on rank 0: .*the rank that holds its stage.*Move it to rank 1"),
        ("0B0 0F0 0F1 0B1\n1F0 1B0 1F1 1B1\n", "deadlocks: .*rank 0 waits at 0B0"),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0\n", "deadlocks: .*rank 0 waits at 0B0 for 1B0.*rank 1 waits at 1F1 for 0F1"),
        ("0F0 0F1 0B0 0B1 0I0\n1F0 1B0 1F1 1B1\n", "0B0 on rank 0: a backward is either B, or I and W; .*Remove it"),
        ("0F0 0F1 0B0 0B1 0I0 0W0\n1F0 1B0 1F1 1B1\n", "0B0 on rank 0: a backward is either B, or I and W"),
        ("0F0 0F1 0B0 0B1 0W0\n1F0 1B0 1F1 1B1\n", "0W0 on rank 0: a backward is either B, or I and W"),
        (
            "0F0 0F1 0B0 0B1 2F0\n1F0 1B0 1F1 1B1\n",
            r"2F0 on rank 0: the stage does not exist. Use one of the stages 0\.\.1",
        ),
        (
            "0F0.0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n",
            "0F0.0 on rank 0: slices are numbered where micro-batches are sliced.*Remove its slice",
        ),
        ("0F0 0SEND_F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", "0SEND_F0 on rank 0: a schedule holds F, B, I and W only"),
    ],
)
def test_the_checker_refuses_with_the_action_the_rule_and_the_fix(text, message):
    check(schedule_of(GOOD))
    with pytest.raises(ScheduleError, match=message) as caught:
        check(schedule_of(text))
    assert "\n" not in str(caught.value)


def test_the_checker_refuses_impossible_sizes():
    good = schedule_of(GOOD)
    with pytest.raises(ScheduleError, match="at least 1"):
        check(replace(good, num_microbatches=0))
    with pytest.raises(ScheduleError, match="at least 1"):
        check(replace(good, num_slices=0))
    with pytest.raises(ScheduleError, match="1 orders for 2 ranks"):
        check(replace(good, orders=good.orders[:1]))
    with pytest.raises(ScheduleError, match=r"one of the micro-batches 0\.\.0"):
        check(replace(good, num_microbatches=1))


def program_of(*rows: str) -> Program:
    """GOOD with communication written by hand."""
    return Program(schedule=schedule_of(GOOD), orders=ir_text.parse_orders("\n".join(rows)))


RANK_0 = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
RANK_1 = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            (RANK_0.replace(" 0SEND_F1", ""), RANK_1),
            "message 1 from rank 0 to rank 1 is sent by None but received as 0S",
        ),
        ((RANK_0.replace(" 0RECV_B1", ""), RANK_1), "message 1 from rank 1 to rank 0 is sent by 1SEND_B1 but .* None"),
        (
            (RANK_0.replace("0F0 0SEND_F0 0F1 0SEND_F1", "0F0 0F1 0SEND_F1 0SEND_F0"), RANK_1),
            "message 0 from rank 0 to rank 1 is sent by 0SEND_F1 but received as 0SEND_F0.*one order",
        ),
        ((RANK_0 + " 0SEND_B0", RANK_1), "0SEND_B0 on rank 0 has no other rank at its other end.*Remove it"),
        ((RANK_0, RANK_1 + " 1SEND_F1"), "1SEND_F1 on rank 1 has no other rank"),
        ((RANK_0 + " 0SEND_F1", RANK_1 + " 1RECV_F1"), "0SEND_F1 appears twice"),
        ((RANK_0, "1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"), "message 0 from rank 0 to rank 1 .* received as None"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), "waits at .*, which no rank runs. Add it"),
        (
            (RANK_0.replace("0B1", "0RECV_B1 0B1").replace("0RECV_B1 ", "", 1), RANK_1.replace("1B1 1S", "1S")),
            "rank 1 runs nothing where its schedule has 1B1: .* Lower the schedule that is meant",
        ),
        ((RANK_0, RANK_1.replace("1B0 1SEND_B0", "1SEND_B0 1B0")), "deadlocks: .*1SEND_B0 for 1B0"),
        ((RANK_0 + " 0REDUCE_GRAD", RANK_1), "shares no gradients of stage 0"),
    ],
)
def test_the_checker_refuses_programs_whose_messages_do_not_match(rows, message):
    check(program_of(RANK_0, RANK_1))
    with pytest.raises(ScheduleError, match=message) as caught:
        check(program_of(*rows))
    assert "\n" not in str(caught.value)


def test_messages_between_chunks_of_one_rank_are_refused():
    schedule = schedules.gpipe(num_ranks=1, num_microbatches=1)
    two = replace(
        schedule,
        placement=Placement.loop(1, 2),
        orders=ir_text.parse_orders("0F0 1F0 1B0 0B0\n"),
    )
    program = lower(two)
    check(program)
    with pytest.raises(ScheduleError, match="0SEND_F0 on rank 0 has no other rank"):
        check(replace(program, orders=ir_text.parse_orders("0F0 0SEND_F0 1RECV_F0 1F0 1B0 0B0\n")))


def test_the_checker_refuses_gradient_reductions_that_come_early_or_twice_or_alone():
    program = lower(schedule_of(GOOD), tied_stages=((0, 1),))
    check(program)
    first, second = program.orders
    early = (*first[:-2], first[-1], first[-2])
    with pytest.raises(
        ScheduleError, match=r"0B1 on rank 0 comes after the sum of stages \(0, 1\): .*Move the sum to the end"
    ):
        check(replace(program, orders=(early, second)))
    with pytest.raises(ScheduleError, match="0REDUCE_GRAD on rank 0 comes after the sum of stages"):
        check(replace(program, orders=((*first, first[-1]), second)))
    alone = replace(program, orders=(first, second[:-1]))
    with pytest.raises(ScheduleError, match=r"1REDUCE_GRAD is missing: .* Add it to the end of rank 1"):
        check(alone)
    with pytest.raises(ScheduleError, match=r"0REDUCE_GRAD is missing: .* Add it to the end of rank 0"):
        check(replace(program, orders=(first[:-1], second[:-1])))
    with pytest.raises(ScheduleError, match="rank 0 waits at 0REDUCE_GRAD for its group"):
        list(dependency_order(alone))
    with pytest.raises(ScheduleError, match="rank 0 waits at 0REDUCE_GRAD for its group"):
        simulate(alone, Costs.uniform())


def test_every_op_is_accepted_by_the_checker_and_the_simulator():
    """What the runtime runs, the checker and the simulator take too."""
    split = schedule_of("0F0 0F1 0I0 0W0 0B1\n1F0 1F1 1B0 1I1 1W1\n")
    data = DataAxis(degree=2, strategy=DataStrategy.ZERO3)
    lowered = lower(split, tied_stages=((0, 1),), data=data, skips=(Skip(0, 1),))
    program = insert_offload(lowered, 1, beside=0)
    orders = tuple((*order, Action(rank, Op.STEP)) for rank, order in enumerate(program.orders))
    program = replace(program, orders=orders)
    assert {action.op for _, action in program.actions()} == set(Op)
    check(program)
    beside = dict.fromkeys((Op.UNSHARD, Op.OFFLOAD, Op.RELOAD, Op.STEP), 0.5)
    timeline = simulate(program, Costs.uniform(other=beside))
    ran = [*map(list, timeline.spans), *map(list, timeline.background)]
    assert {span.action for row in ran for span in row} == {action for _, action in program.actions()}
    ends = [row[-1] for row in timeline.spans]
    assert [span.action.op for span in ends] == [Op.STEP] * 2
    assert all(span.end - span.start == 0.5 for span in ends)


def test_weight_versions_follow_the_policy():
    schedule = schedules.one_f_one_b(num_ranks=3, num_microbatches=6)
    assert check(schedule).weight_versions == (1, 1, 1)
    stash = replace(schedule, weights=WeightPolicy.STASH, microbatches_per_update=1)
    assert check(stash).weight_versions == (3, 2, 1)
    double_buffer = replace(schedule, weights=WeightPolicy.DOUBLE_BUFFER, microbatches_per_update=2)
    assert check(double_buffer).weight_versions == (2, 2, 2)
    for weights, count in ((WeightPolicy.STASH, None), (WeightPolicy.FLUSH, 1), (WeightPolicy.STASH, 4)):
        with pytest.raises(ScheduleError, match="micro-batches"):
            check(replace(schedule, weights=weights, microbatches_per_update=count))
    with pytest.raises(ScheduleError, match="Increase microbatches_per_update=1"):
        check(replace(double_buffer, microbatches_per_update=1))


def test_the_json_of_a_schedule_is_refused_where_it_is_none():
    for text in ("", "[]", "{}", '{"name": "x"}', "null"):
        with pytest.raises(ScheduleError, match=r"the schedule(: missing keys? | is .* an object| is not valid JSON)"):
            ir_text.from_json(text)


def test_a_csv_of_torch_reads_without_its_communication():
    csv = "0F0,0SEND_F0,0F1,0SEND_F1,,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n"
    schedule = from_csv(csv)
    check(schedule)
    assert ir_text.format_orders(schedule.orders) == "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"
    assert lower(schedule).orders[1][:2] == (Action(1, Op.RECV_F, 0), Action(1, F, 0))
    with pytest.raises(ScheduleError, match=r"none of stage [0-9]+: stages must be numbered from 0 without gaps"):
        from_csv("0F0,0B0\n2F0,2B0\n")
    with pytest.raises(ScheduleError, match=r": an action is stage, op, micro-batch and slice\. Write"):
        from_csv("0F0,zero\n")


def test_refusals_are_input_errors():
    assert issubclass(ScheduleError, InputError)
    assert issubclass(InputError, ValueError)
