"""Costs, networks, programs and timelines. Closed forms of whole schedules are in test_schedules."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule, check
from pipeloom.ir.text import parse_orders
from pipeloom.passes import forward_only, lower
from pipeloom.sim import Costs, Network, Span, Timeline, critical_path, measured_timeline, simulate

F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


def by_hand(text: str, placement: Placement, **kwargs) -> Schedule:
    orders = parse_orders(text)
    microbatches = 1 + max(a.microbatch for order in orders for a in order)
    return Schedule(name="hand", num_microbatches=microbatches, placement=placement, orders=orders, **kwargs)


def spans_of(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    return [(str(action), start, end) for action, start, end in timeline.spans[rank]]


def test_a_full_backward_is_the_sum_of_its_parts():
    costs = Costs.uniform(forward=1.0, backward_input=0.25, backward_weight=0.5)
    schedule = schedules.gpipe(num_ranks=2, num_microbatches=1)
    assert spans_of(simulate(schedule, costs), 0) == [("0F0", 0.0, 1.0), ("0B0", 2.75, 3.5)]


def test_slices_of_other_lengths_take_other_times():
    schedule = schedules.seq1f1b(num_ranks=2, num_microbatches=1, num_slices=2)
    costs = replace(Costs.uniform(forward=2.0, backward=4.0), slice_factors=((1.5, 0.5), (0.5, 1.5)))
    assert spans_of(simulate(schedule, costs), 1) == [
        ("1F0.0", 1.5, 3.0), ("1F0.1", 3.0, 3.5), ("1B0.1", 3.5, 6.5), ("1B0.0", 6.5, 7.5)
    ]  # fmt: skip
    with pytest.raises(InputError, match="slice_factors are for 2 and 2 slices: schedule 'gpipe' has 1"):
        simulate(schedules.gpipe(num_ranks=2, num_microbatches=1), costs)
    with pytest.raises(InputError, match=r"slice factor=-1\.0: must be a number of seconds from 0"):
        replace(costs, slice_factors=((-1.0,), (1.0,)))


def test_backward_alone_splits_into_halves():
    costs = Costs.uniform(forward=1.0, backward=3.0)
    assert (costs.backward_input, costs.backward_weight) == (1.5, 1.5)
    assert Costs.uniform() == Costs.uniform(forward=1.0, backward=2.0)
    stages = Costs.per_stage(forward=[1, 2], backward=[4, 6])
    assert (stages.backward_input, stages.backward_weight) == ((2, 3), (2, 3))


def test_a_chunk_takes_its_share_of_a_rank_and_a_slice_of_a_micro_batch():
    costs = Costs.uniform(forward=1.0, backward=2.0)
    chunks = by_hand("0F0 1F0 1B0 0B0\n", Placement.loop(1, 2))
    assert [end - start for _, start, end in simulate(chunks, costs).spans[0]] == [0.5, 0.5, 1.0, 1.0]
    slices = by_hand("0F0.0 0F0.1 0B0.1 0B0.0\n", Placement.loop(1), num_slices=2)
    timeline = simulate(slices, costs)
    assert [end - start for _, start, end in timeline.spans[0]] == [0.5, 0.5, 1.0, 1.0]
    assert timeline.ideal_seconds == simulate(chunks, costs).ideal_seconds == 3.0
    assert timeline.peak_activations == simulate(chunks, costs).peak_activations == (1.0,)
    assert timeline.num_slices == 2
    assert simulate(chunks, costs).num_chunks == 2


def test_a_stage_held_twice_takes_a_whole_share():
    schedule = by_hand("0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1\n", Placement.bidirectional(2))
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.ideal_seconds == 6.0
    assert timeline.makespan == 6.0
    assert timeline.bubble_fraction == 0.0


def test_slices_pipeline_through_the_stages():
    """Two slices halve the bubble of one micro-batch: (p-1)(tF+tB)/k."""
    schedule = by_hand("0F0.0 0F0.1 0B0.1 0B0.0\n1F0.0 1F0.1 1B0.1 1B0.0\n", Placement.loop(2), num_slices=2)
    assert simulate(schedule, Costs.uniform()).makespan == 3.0 + 3.0 / 2


def test_weights_may_wait_while_input_gradients_travel():
    whole = by_hand("0F0 0B0\n1F0 1B0\n", Placement.loop(2))
    split = by_hand("0F0 0I0 0W0\n1F0 1I0 1W0\n", Placement.loop(2))
    costs = Costs.uniform(forward=1.0, backward=2.0)
    assert simulate(whole, costs).makespan == 6.0
    assert simulate(split, costs).makespan == 5.0
    assert simulate(split, costs).memory[1] == ((0.0, 0.0), (1.0, 1.0), (4.0, 0.0))


def test_an_overlapped_pair_is_one_unit():
    """0F1 waits until 0B0 may start too, and what 0F1 yields is there when the pair has ended."""
    pair = (Action(0, F, 1), Action(0, B, 0))
    schedule = by_hand("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", Placement.loop(2), overlapped=frozenset({pair}))
    costs = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, overlap=0.5)
    for pipeline in (schedule, lower(schedule)):
        timeline = simulate(pipeline, costs)
        assert [(str(a), start, end) for a, start, end in timeline.compute_spans[0]] == [
            ("0F0", 0.0, 1.0),
            ("0F1", 4.0, 4.5),
            ("0B0", 4.5, 5.5),
            ("0B1", 8.5, 10.5),
        ]
        assert [(start, end) for _, start, end in timeline.compute_spans[1]] == [(1, 2), (2, 4), (5.5, 6.5), (6.5, 8.5)]
    lowered = " ".join(map(str, lower(schedule).orders[0]))
    assert lowered == "0F0 0SEND_F0 0RECV_B0 0F1 0B0 0SEND_F1 0RECV_B1 0B1"


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (Action(0, F, 0), Action(0, B, 0), "0F0 and 0B0: an overlapped pair is an F with a B or I"),
        (Action(0, B, 0), Action(0, B, 1), "0B0 and 0B1: an overlapped pair is an F with a B or I"),
        (Action(0, F, 1), Action(0, B, 0), "deadlocks.*0F1 for 1B0.*1F1"),
    ],
)
def test_pairs_that_cannot_overlap_are_refused(first, second, message):
    text = "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n"
    schedule = by_hand(text, Placement.loop(2), overlapped=frozenset({(first, second)}))
    with pytest.raises(ScheduleError, match=message):
        check(schedule)


def test_an_action_is_in_one_pair_alone():
    pairs = {(Action(0, F, 1), Action(0, B, 0)), (Action(0, F, 0), Action(0, B, 0))}
    schedule = by_hand("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n", Placement.loop(2), overlapped=frozenset(pairs))
    with pytest.raises(ScheduleError, match="0B0 is in two overlapped pairs"):
        check(schedule)


def test_uneven_stages_are_bound_by_the_slowest():
    """GPipe (A2): the slowest stage sets the pace, the others add their time once."""
    forward, backward = [1.0, 3.0, 2.0], [2.0, 5.0, 1.0]
    for m in range(1, 9):
        timeline = simulate(
            schedules.gpipe(num_ranks=3, num_microbatches=m), Costs.per_stage(forward=forward, backward=backward)
        )
        assert timeline.makespan == pytest.approx(sum(forward) + sum(backward) + (m - 1) * (3.0 + 5.0))
        assert timeline.ideal_seconds == pytest.approx(m * (sum(forward) + sum(backward)) / 3)
        assert timeline.busy_seconds == pytest.approx([m * (f + b) for f, b in zip(forward, backward, strict=True)])


def test_makespan_and_span_differ_where_ranks_finish_early():
    timeline = simulate(schedules.naive(num_ranks=3, num_microbatches=1), Costs.uniform())
    assert timeline.makespan == timeline.span_seconds == 9.0
    last_only = by_hand("0F0 0I0 0W0\n1F0 1I0 1W0\n", Placement.loop(2))
    timeline = simulate(last_only, Costs.uniform())
    assert (timeline.makespan, timeline.span_seconds) == (5.0, 5.0)
    assert timeline.bubble_fraction_span == pytest.approx(1 - 3.0 / 5.0)


def test_evaluation_keeps_one_activation():
    timeline = simulate(forward_only(schedules.one_f_one_b(num_ranks=2, num_microbatches=3)), Costs.uniform())
    assert timeline.makespan == 4.0
    assert timeline.ideal_seconds == 3.0
    assert timeline.peak_activations == (1.0, 1.0)
    assert timeline.memory[0][-1] == (3.0, 0.0)


def test_a_receive_ends_when_its_message_arrives_and_a_send_blocks_nobody():
    program = lower(schedules.gpipe(num_ranks=2, num_microbatches=2))
    network = Network(latency_seconds=0.5)
    timeline = simulate(program, Costs.uniform(forward=1.0, backward=2.0), network)
    assert spans_of(timeline, 0)[:4] == [
        ("0F0", 0.0, 1.0),
        ("0SEND_F0", 1.0, 1.0),
        ("0F1", 1.0, 2.0),
        ("0SEND_F1", 2.0, 2.0),
    ]
    assert spans_of(timeline, 1)[:4] == [
        ("1RECV_F0", 0.0, 1.5),
        ("1F0", 1.5, 2.5),
        ("1RECV_F1", 2.5, 2.5),
        ("1F1", 2.5, 3.5),
    ]
    assert timeline.makespan == simulate(program.schedule, Costs.uniform(), network).makespan == 10.0


def test_sending_and_receiving_may_keep_their_ranks_busy():
    program = lower(schedules.gpipe(num_ranks=2, num_microbatches=1))
    network = Network(latency_seconds=0.5, send_seconds=0.25, receive_seconds=0.125)
    timeline = simulate(program, Costs.uniform(forward=1.0, backward=2.0), network)
    assert spans_of(timeline, 0) == [
        ("0F0", 0.0, 1.0),
        ("0SEND_F0", 1.0, 1.25),
        ("0RECV_B0", 1.25, 5.75),
        ("0B0", 5.75, 7.75),
    ]
    assert spans_of(timeline, 1)[:2] == [("1RECV_F0", 0.0, 1.875), ("1F0", 1.875, 2.875)]
    assert timeline.ideal_seconds == 3.0


def test_latency_may_differ_by_pair_and_direction():
    network = Network(latency_seconds=((0.0, 1.0, 9.0), (2.0, 0.0, 4.0), (9.0, 8.0, 0.0)))
    schedule = schedules.naive(num_ranks=3, num_microbatches=1)
    assert simulate(schedule, Costs.uniform(), network).makespan == 9.0 + 1.0 + 4.0 + 8.0 + 2.0
    assert simulate(lower(schedule), Costs.uniform(), network).makespan == 24.0


def test_a_gradient_reduction_lasts_until_all_have_come():
    program = lower(schedules.naive(num_ranks=3, num_microbatches=1), tied_stages=((0, 2),))
    timeline = simulate(program, Costs.uniform(other={Op.REDUCE_GRAD: 0.5}))
    assert spans_of(timeline, 0)[-1] == ("0REDUCE_GRAD", 9.0, 9.5)
    assert spans_of(timeline, 2)[-1] == ("2REDUCE_GRAD", 5.0, 9.5)
    assert timeline.makespan == 9.5
    assert timeline.span_seconds == 9.0


def test_reductions_of_several_groups_on_the_same_ranks_are_kept_apart():
    schedule = by_hand("0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1\n", Placement.bidirectional(2))
    timeline = simulate(lower(schedule), Costs.uniform(other={Op.REDUCE_GRAD: 1.0}))
    for rank in (0, 1):
        assert spans_of(timeline, rank)[-2:] == [("0REDUCE_GRAD", 6.0, 7.0), ("1REDUCE_GRAD", 7.0, 8.0)]


def test_the_critical_path_is_one_unbroken_chain():
    for m in (1, 3, 8):
        schedule = schedules.one_f_one_b(num_ranks=4, num_microbatches=m)
        timeline = simulate(schedule, Costs.per_stage(forward=[1, 2, 1, 1], backward=[2, 3, 2, 2]))
        path = critical_path(timeline)
        assert path[0][1].start == 0.0
        assert path[-1][1].end == timeline.makespan
        for (_, first), (_, second) in itertools.pairwise(path):
            assert first.end == second.start
    assert critical_path(measured_timeline(schedule, [[]] * 4)) == []


def test_the_critical_path_crosses_ranks_by_messages():
    timeline = simulate(schedules.naive(num_ranks=3, num_microbatches=1), Costs.uniform(), Network(latency_seconds=0.5))
    assert [str(span.action) for _, span in critical_path(timeline)] == ["0F0", "1F0", "2F0", "2B0", "1B0", "0B0"]
    assert [rank for rank, _ in critical_path(timeline)] == [0, 1, 2, 2, 1, 0]


def test_a_measured_run_gives_the_same_type():
    program = lower(schedules.one_f_one_b(num_ranks=2, num_microbatches=3))
    predicted = simulate(program, Costs.uniform(), Network(latency_seconds=0.25, send_seconds=0.125))
    records = [[(a, start + 1000.0, end + 1000.0) for a, start, end in row] for row in predicted.spans]
    measured = measured_timeline(program, records)
    assert measured == replace(predicted, kind="measured")
    with pytest.raises(InputError, match="records of 1 ranks: must have one entry for each of 2 ranks"):
        measured_timeline(program, records[:1])


def test_what_a_rank_waits_before_the_first_computation_is_no_part_of_a_step():
    program = lower(schedules.gpipe(num_ranks=2, num_microbatches=1))
    records = [
        [(Action(0, F, 0), 10.0, 11.0), (Action(0, Op.RECV_B, 0), 11.0, 14.0), (Action(0, B, 0), 14.0, 16.0)],
        [(Action(1, Op.RECV_F, 0), 7.0, 11.0), (Action(1, F, 0), 11.0, 12.0), (Action(1, B, 0), 12.0, 14.0)],
    ]
    timeline = measured_timeline(program, records, name="run")
    assert timeline.name == "run"
    assert timeline.makespan == 6.0
    assert timeline.spans[1][0] == Span(Action(1, Op.RECV_F, 0), 0.0, 1.0)
    assert timeline.ideal_seconds == 3.0
    assert timeline.peak_activations == (1.0, 1.0)


def test_the_schedule_of_a_timeline_is_the_one_that_ran():
    schedule = schedules.one_f_one_b(num_ranks=3, num_microbatches=4)
    assert simulate(lower(schedule), Costs.uniform()).schedule == schedule


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"name": 1, "kind": "simulated", "spans": 3}', "\x00"])
def test_what_is_no_timeline_is_refused(text):
    with pytest.raises(InputError, match="not the JSON of a timeline"):
        Timeline.from_json(text)


def test_impossible_costs_are_refused():
    for bad in (-1.0, math.nan, math.inf):
        for what in ("forward", "backward_input", "backward_weight"):
            with pytest.raises(InputError, match=f"{what}={bad}: must be a number of seconds from 0"):
                Costs.uniform(**{what: bad})
        with pytest.raises(InputError, match="forward="):
            Costs.per_stage(forward=[1.0, bad], backward=[1.0, 1.0])
        with pytest.raises(InputError, match="STEP="):
            Costs.uniform(other={Op.STEP: bad})
        with pytest.raises(InputError, match="latency_seconds="):
            Network(latency_seconds=bad)
        with pytest.raises(InputError, match="latency_seconds="):
            Network(latency_seconds=((0.0, bad), (0.0, 0.0)))
        with pytest.raises(InputError, match=f"send_seconds={bad}: must be a number of seconds"):
            Network(send_seconds=bad)
    with pytest.raises(InputError, match="both backward and its parts, whose sum it is"):
        Costs.uniform(backward=2.0, backward_input=1.0)
    with pytest.raises(InputError, match="need either backward, or both"):
        Costs.per_stage(forward=[1.0])
    with pytest.raises(InputError, match="need either backward, or both"):
        Costs.per_stage(forward=[1.0], backward=[2.0], backward_input=[1.0], backward_weight=[1.0])
    for half in ({"backward_input": [1.0]}, {"backward": [2.0], "backward_weight": [1.0]}):
        with pytest.raises(InputError, match="need either backward, or both"):
            Costs.per_stage(forward=[1.0], **half)


def test_costs_and_latencies_for_another_pipeline_are_refused():
    schedule = schedules.gpipe(num_ranks=3, num_microbatches=1)
    with pytest.raises(InputError, match="forward has 2 entries: schedule 'gpipe' has 3 stages"):
        simulate(schedule, Costs.per_stage(forward=[1, 1], backward=[1, 1]))
    with pytest.raises(InputError, match="3 ranks need a 3 x 3 table"):
        simulate(schedule, Costs.uniform(), Network(latency_seconds=((0.0, 1.0), (1.0, 0.0))))


def test_a_deadlock_is_refused_and_not_simulated():
    schedule = by_hand("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n", Placement.loop(2))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(schedule)
    with pytest.raises(ScheduleError, match="deadlocks"):
        simulate(schedule, Costs.uniform())


def test_a_pipeline_that_takes_no_time_has_no_bubble():
    timeline = simulate(schedules.gpipe(num_ranks=2, num_microbatches=2), Costs.uniform(forward=0.0, backward=0.0))
    assert (timeline.makespan, timeline.bubble_fraction, timeline.bubble_fraction_span) == (0.0, 0.0, 0.0)


def test_a_gradient_reduction_waits_for_messages_of_the_others():
    program = lower(schedules.one_f_one_b(num_ranks=2, num_microbatches=1), tied_stages=((0, 1),))
    timeline = simulate(program, Costs.uniform(forward=1.0, backward=2.0), Network(latency_seconds=0.5))
    # Rank 0 comes at 7, when what rank 1 sent at 4.5 is long there; rank 1 gets what rank 0 sends at 7.5.
    assert [row[-1].action.op for row in timeline.spans] == [Op.REDUCE_GRAD, Op.REDUCE_GRAD]
    assert [row[-1].end for row in timeline.spans] == [7.0, 7.5]
