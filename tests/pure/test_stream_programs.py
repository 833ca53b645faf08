"""Streams as programs: where updates stand, what is refused, and what holds for every one of them."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, lcm

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, Schedule, WeightPolicy, check
from pipeloom.ir.text import from_json, to_json
from pipeloom.ir.versions import num_updates, versions_used
from pipeloom.passes import forward_only, lower, repeat_steps
from pipeloom.schedules import build
from pipeloom.sim import Costs, Timeline, critical_path, simulate
from tests.pure.test_streams import stream, usual_2bw


def edited(program, rank: int, order):
    return replace(program, orders=(*program.orders[:rank], tuple(order), *program.orders[rank + 1 :]))


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)])
def test_an_update_that_is_moved_dropped_or_doubled_is_refused(replicas):
    program = lower(stream("stash", replicas, 4, 2))
    check(program)
    tried = 0
    for rank, order in enumerate(program.orders):
        for at, action in enumerate(order):
            if action.op not in (Op.STEP, Op.REDUCE_GRAD):
                continue
            rest = [*order[:at], *order[at + 1 :]]
            ops = (Op.B, Op.STEP, Op.REDUCE_GRAD)
            places = [i for i in range(len(rest) + 1) if i == len(rest) or rest[i].op in ops]
            wrong = [[*rest[:i], action, *rest[i:]] for i in places] + [
                rest,
                [*order[:at], action, action, *order[at:]],
            ]
            kept = [a for a in order if a.op in ops]
            for each in wrong:
                if [a for a in each if a.op in ops] == kept:
                    continue
                tried += 1
                with pytest.raises(
                    ScheduleError, match=rf"rank {rank} runs .* in place of .*: an update comes behind"
                ) as caught:
                    check(edited(program, rank, each))
                assert "\n" not in str(caught.value)
    assert tried > 50


def test_an_update_with_another_number_is_refused():
    program = lower(stream("stash", (1, 1), 4))
    order = [a._replace(microbatch=a.microbatch + 1) if a.op is Op.STEP else a for a in program.orders[0]]
    with pytest.raises(ScheduleError, match="runs 0STEP1 in place of 0STEP0"):
        check(edited(program, 0, order))


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)])
def test_a_forward_that_is_moved_over_an_update_is_refused(replicas):
    """It would meet another version than the schedule says, which is what the runtime goes by."""
    program = lower(stream("stash", replicas, 4, 2))
    tried = 0
    for rank, order in enumerate(program.orders):
        for at, step in enumerate(order):
            behind = next((i for i in range(at, len(order)) if order[i].op is Op.F), None)
            if step.op is Op.STEP and behind is not None:
                moved = [*order[:at], order[behind], *order[at:behind], *order[behind + 1 :]]
                with pytest.raises(ScheduleError, match=rf"runs {order[behind]} in place of {step}"):
                    check(edited(program, rank, moved))
                tried += 1
    assert tried > 3


def test_replicas_give_their_gradients_and_update_one_micro_batch_later():
    program = lower(stream("stash", (2, 1), 3))
    texts = [
        [str(a) for a in order if a.op not in (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)] for order in program.orders
    ]
    assert (
        " ".join(texts[0]) == "0F0 0F2 0B0 0REDUCE_GRAD0 0F4 0B2 0REDUCE_GRAD2 0STEP0 0B4 0REDUCE_GRAD4 0STEP1 0STEP2"
    )
    assert (
        " ".join(texts[1]) == "0F1 0F3 0B1 0REDUCE_GRAD1 0F5 0B3 0REDUCE_GRAD3 0STEP0 0B5 0REDUCE_GRAD5 0STEP1 0STEP2"
    )
    assert " ".join(texts[2]) == " ".join(f"1F{b} 1B{b} 1STEP{b}" for b in range(6))
    for action in program.orders[0]:
        if action.op is Op.SEND_B:  # no update keeps the stage waiting that needs the gradient
            at = program.orders[0].index(action)
            assert program.orders[0][at - 1].op is Op.B


def test_stages_that_share_parameters_are_refused():
    with pytest.raises(ScheduleError, match="hold the same parameters but update them at different times"):
        lower(stream("stash", (1, 1), 4), tied_stages=((0, 1),))


@pytest.mark.parametrize("kind", ["stash", "vertical", "2bw"])
def test_streams_read_back_exactly(kind):
    for replicas in ((1, 1, 1), (2, 1)):
        schedule = usual_2bw(replicas, 4) if kind == "2bw" else stream(kind, replicas, 4, 2)
        assert from_json(to_json(schedule)) == schedule
        timeline = simulate(lower(schedule), replace(Costs.uniform(), parameter_bytes=(5.0,) * len(replicas)))
        again = Timeline.from_json(timeline.to_json())
        assert again == timeline
        assert again.schedule == schedule
        assert again.versions_used == versions_used(schedule)


def test_evaluation_of_a_stream_updates_nothing():
    for replicas in ((1, 1, 1), (2, 1)):
        schedule = stream("vertical", replicas, 3)
        evaluation = forward_only(schedule)
        assert (evaluation.weights, evaluation.microbatches_per_update) == (WeightPolicy.FLUSH, None)
        assert check(evaluation).weight_versions == (1,) * schedule.num_ranks
        program = lower(evaluation)
        check(program)
        assert {action.op for _, action in program.actions()} == {Op.F, Op.SEND_F, Op.RECV_F}
        with pytest.raises(ScheduleError, match="evaluation updates nothing"):
            check(replace(evaluation, weights=WeightPolicy.STASH, microbatches_per_update=1))


def test_streams_one_behind_the_other_are_a_stream():
    twice = repeat_steps(stream("stash", (2, 1), 4), 2)
    assert check(twice).weight_versions == check(stream("stash", (2, 1), 4)).weight_versions
    check(lower(twice))


@st.composite
def streams(draw) -> Schedule:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    each = draw(st.integers(1, 5))
    kind = draw(st.sampled_from(["stash", "vertical", "2bw"]))
    more = draw(st.integers(0, 3))
    in_flight = ceil(sum(replicas) / replicas[0]) + more if more else None
    updates = draw(st.integers(1, max(1, 60 // lcm(each, *replicas))))
    try:
        return stream(kind, replicas, updates, each, in_flight)
    except ScheduleError:
        assume(kind != "2bw")
        raise


@settings(max_examples=120, deadline=None)
@given(streams(), st.data())
def test_every_stream_is_legal_is_lowered_and_simulates(schedule, data):
    checked = check(schedule)
    program = lower(schedule)
    assert check(program) == checked
    check(lower(forward_only(schedule)))
    times = st.lists(st.floats(0.1, 3.0), min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs.per_stage(
        forward=data.draw(times), backward=data.draw(times), other={Op.STEP: data.draw(st.floats(0, 1))}
    )
    timeline = simulate(program, costs)
    assert {span.action for row in timeline.spans for span in row} == {action for _, action in program.actions()}
    assert timeline.weight_versions == checked.weight_versions
    assert timeline.makespan >= timeline.ideal_period_seconds * timeline.num_microbatches * (1 - 1e-9)
    free = simulate(schedule, costs)
    assert timeline.makespan >= free.makespan * (1 - 1e-9)
    path = critical_path(free)
    assert path[-1][1].end == free.makespan
    used = versions_used(schedule)
    for stage in range(schedule.num_stages):
        versions = [used[stage, b] for b in range(schedule.num_microbatches)]
        assert versions == sorted(versions)
        assert versions[-1] <= num_updates(schedule, stage)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pipedream", {"weights": "mean"}, "weights='mean': must be 'stash' or 'vertical' for schedule 'pipedream'"),
        ("pipedream", {"replicas": (2, 1)}, r"replicas=\[2, 1\]: .* their sum must be num_ranks=4"),
        ("pipedream", {"replicas": (4, 0)}, "every stage must have at least 1"),
        ("pipedream", {"replicas": (2.0, 2)}, "every stage must have at least 1"),
        ("pipedream", {"replicas": (3, 1)}, "8 micro-batches, but stage 0 with 3 replicas .* Use a multiple of 3"),
        ("pipedream", {"microbatches_per_update": 3}, "stage 0 with 1 replicas updates after every 3"),
        ("pipedream", {"microbatches_per_update": 0}, "0 micro-batches per update: must be at least 1"),
        ("pipedream", {"microbatches_per_update": "2"}, "'2' micro-batches per update: must be an int"),
        ("pipedream", {"in_flight": 3}, "in_flight=3: .* need at least 4"),
        ("pipedream", {"in_flight": 0}, "0 in flight"),
        ("pipedream-2bw", {"microbatches_per_update": 2}, r"two versions .* too few .* Use 3\.$"),
        ("pipedream-2bw", {"microbatches_per_update": 0}, "0 micro-batches per update: must be at least 1"),
        (
            "pipedream-2bw",
            {"weights": "stash"},
            r"weights=stash: schedule 'pipedream-2bw' does not take it. .* use pipedream\.$",
        ),
        (
            "gpipe",
            {"replicas": (2, 2)},
            r"replicas=.*: schedule 'gpipe' does not take it. .* use 1f1b, pipedream, pipedream-2bw\.$",
        ),
        ("search", {"in_flight": 4}, "schedule 'search' does not take it"),
        (
            "mine.csv",
            {"weights": "stash"},
            "weights='stash': schedule 'mine.csv' is a file, which defines weights itself",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(name, options, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        build(name, num_ranks=4, num_microbatches=8, **options)
    assert "\n" not in str(caught.value)


def test_only_streams_have_options_of_streams():
    assert {name for name, family in schedules.FAMILIES.items() if family.stream} == {"pipedream", "pipedream-2bw"}
    assert schedules.FAMILIES.keys() - schedules.SYNCHRONOUS.keys() == {"pipedream", "pipedream-2bw"}
    for name, family in schedules.FAMILIES.items():
        schedule = build(name, num_ranks=4, num_microbatches=8)
        assert bool(family.stream) == (schedule.weights is not WeightPolicy.FLUSH)


def test_slices_and_forwards_that_come_too_early_are_refused():
    flushed = build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=2)
    with pytest.raises(ScheduleError, match="sequences are sliced under weight policy 'flush' only"):
        check(replace(flushed, weights=WeightPolicy.STASH, microbatches_per_update=1))
    early = replace(
        build("gpipe", num_ranks=2, num_microbatches=8), weights=WeightPolicy.DOUBLE_BUFFER, microbatches_per_update=2
    )
    with pytest.raises(ScheduleError, match=r"0F4 uses version 1 .* comes before the update"):
        check(early)
