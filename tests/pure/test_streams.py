"""Streams that update parameters while they run: PipeDream, 1F1B-RR and 2BW against the formulas of their papers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import ceil, lcm

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Action, Op, Placement, Schedule, WeightPolicy, check
from pipeloom.ir.text import from_json, to_json
from pipeloom.ir.versions import last_uses, num_updates, versions_used, weight_version_bytes, with_updates
from pipeloom.passes import forward_only, lower, repeat_steps
from pipeloom.report import timeline_svg
from pipeloom.report.perfetto import trace
from pipeloom.schedules import build, pipedream, pipedream_2bw
from pipeloom.sim import Costs, Timeline, critical_path, simulate

VECTORS = ((1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 1, 1), (2, 2), (3, 1), (4, 2, 1), (1, 2, 1), (2, 3, 1), (1, 3))


def stream(kind: str, replicas: tuple[int, ...], updates: int, each: int = 1, in_flight: int | None = None) -> Schedule:
    """`kind` is stash, vertical or 2bw; long enough for `updates` updates of all stages."""
    options = {"replicas": replicas, "microbatches_per_update": each, "num_in_flight": in_flight}
    sizes = {"num_ranks": sum(replicas), "num_microbatches": lcm(each, *replicas) * updates}
    return pipedream_2bw(**sizes, **options) if kind == "2bw" else pipedream(**sizes, **options, weights=kind)


def usual_2bw(replicas: tuple[int, ...], updates: int) -> Schedule:
    """2BW with the number of micro-batches an update that it takes by itself: the first that it accepts."""
    for each in range(len(replicas), 100):
        with suppress(ScheduleError):
            expected = stream("2bw", replicas, updates, each)
            found = pipedream_2bw(
                num_ranks=expected.num_ranks, num_microbatches=expected.num_microbatches, replicas=replicas
            )
            assert found == expected
            return found
    raise AssertionError(replicas)


# --- what is in flight, and which versions ---------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", VECTORS)
def test_as_many_are_in_flight_as_pipedream_says(replicas):
    for updates in (1, 2, 9):
        schedule = stream("stash", replicas, updates)
        said = []
        for stage, ranks in enumerate(replicas):
            own = schedule.num_microbatches // ranks
            said += [min(ceil(sum(replicas[stage:]) / ranks), own)] * ranks
        assert check(schedule).live_activations == check(lower(schedule)).live_activations == tuple(said)


@pytest.mark.parametrize("p", range(2, 9))
def test_versions_lag_and_are_held_as_the_papers_say(p):
    for m in (2 * p - 1, 3 * p):
        stash, vertical = (check(stream(kind, (1,) * p, m)) for kind in ("stash", "vertical"))
        assert stash.weight_versions == tuple(p - d for d in range(p))
        assert vertical.weight_versions == (p,) * p
    assert check(stream("vertical", (1,) * p, 1)).weight_versions == (1,) * p
    for b in range(3 * p):  # newest is version b when B of micro-batch b begins
        for d in range(p):
            lags = [b - versions_used(stream(kind, (1,) * p, 3 * p))[d, b] for kind in ("stash", "vertical")]
            assert lags == [min(b, p - 1 - d), min(b, p - 1)]


@pytest.mark.parametrize("p", range(2, 9))
def test_two_buffers_are_enough_from_p_minus_1_micro_batches_on(p):
    for each in range(1, p - 1):
        with pytest.raises(ScheduleError, match=f"too few for what is in flight; take {p - 1}$"):
            stream("2bw", (1,) * p, 4, each)
        slow = replace(stream("stash", (1,) * p, 4, each), weights=WeightPolicy.DOUBLE_BUFFER)
        with pytest.raises(ScheduleError, match="stands before the update that makes it; take more"):
            check(slow)
    for each in (p - 1, p, 2 * p + 1):
        schedule = stream("2bw", (1,) * p, 5, each)
        assert check(schedule).weight_versions == (2,) * p
        assert all(version == max(b // each - 1, 0) for (_, b), version in versions_used(schedule).items())


def newest_by_counting(stage: int, b: int, replicas: tuple[int, ...], each: int, in_flight: int | None) -> int:
    """How many updates a stage has made when F of micro-batch b begins: from its backwards before, counted."""
    ranks = replicas[stage]
    forwards_first = ceil(sum(replicas[stage:]) / ranks) if stage or in_flight is None else in_flight
    backwards = max(0, b // ranks - (forwards_first - 1))
    a_replicas_share = lcm(each, ranks) // ranks
    late = ranks > 1  # the gradients of the other replicas come while one more micro-batch runs
    return max(0, backwards - late) // a_replicas_share


@pytest.mark.parametrize("replicas", VECTORS)
@pytest.mark.parametrize("more", [None, 1, 3])
def test_every_micro_batch_uses_the_version_that_counting_gives(replicas, more):
    in_flight = None if more is None else ceil(sum(replicas) / replicas[0]) + more
    stages = range(len(replicas))
    for each in (1, 2, 3, 5):
        schedules_of = {kind: stream(kind, replicas, 7, each, in_flight) for kind in ("stash", "vertical")}
        used = {kind: versions_used(schedule) for kind, schedule in schedules_of.items()}
        for b in range(schedules_of["stash"].num_microbatches):
            newest = [newest_by_counting(s, b, replicas, each, in_flight) for s in stages]
            assert [used["stash"][s, b] for s in stages] == newest
            seen = min(version * lcm(each, ranks) for version, ranks in zip(newest, replicas, strict=True))
            assert [used["vertical"][s, b] * lcm(each, replicas[s]) // lcm(each, *replicas) for s in stages] == [
                seen // lcm(each, replicas[s]) * lcm(each, replicas[s]) // lcm(each, *replicas) for s in stages
            ]
            for s in stages:  # no update between what it has and what the others have seen
                assert used["vertical"][s, b] == seen // lcm(each, replicas[s])


@pytest.mark.parametrize("replicas", VECTORS)
def test_2bw_of_replicas_takes_the_fewest_micro_batches_that_two_versions_are_enough_for(replicas):
    usual = usual_2bw(replicas, 5)
    each = usual.microbatches_per_update
    assert each >= len(replicas)
    assert max(check(usual).weight_versions) == 2  # one where an update that is made later is made in time
    for (stage, b), version in versions_used(usual).items():
        assert version == max(b // usual.update_interval(stage) - 1, 0)
    for fewer in range(1, each + 2):
        forced = replace(stream("stash", replicas, 5, fewer), weights=WeightPolicy.DOUBLE_BUFFER)
        try:
            schedule = stream("2bw", replicas, 5, fewer)
        except ScheduleError:
            with pytest.raises(ScheduleError, match="stands before the update"):
                check(forced)
        else:
            assert max(check(schedule).weight_versions) == max(check(forced).weight_versions) == 2


def by_hand() -> list[Schedule]:
    """Streams with several stages a rank, and with split backwards."""
    made = [
        build("interleaved", num_ranks=2, num_microbatches=8, num_chunks=2),
        build("zb-h1", num_ranks=3, num_microbatches=8),
        build("zb-v", num_ranks=3, num_microbatches=8),
    ]
    policies = (WeightPolicy.STASH, WeightPolicy.VERTICAL)
    return [replace(s, weights=w, microbatches_per_update=each) for s in made for w in policies for each in (1, 2, 4)]


@pytest.mark.parametrize(
    "schedule",
    [stream(kind, v, 4, each) for v in VECTORS for kind, each in (("stash", 1), ("vertical", 2))]
    + [usual_2bw(v, 4) for v in VECTORS]
    + by_hand(),
    ids=lambda s: f"{s.name}-{s.weights}-{s.placement.replicas}-{s.microbatches_per_update}",
)
def test_versions_held_are_those_that_somebody_still_needs(schedule):
    """Action by action: what exists is the newest version of a stage and every older one that a backward will use."""
    used = versions_used(schedule)
    sizes = [3.0 + stage for stage in range(schedule.num_stages)]
    most_bytes = []
    for rank, held in enumerate(schedule.placement.stages_of):
        newest = dict.fromkeys(held, 0)
        wanted = {stage: {} for stage in held}
        for action in schedule.orders[rank]:
            if action.op is Op.F:
                wanted[action.stage][action.microbatch] = used[action.stage, action.microbatch]
        most, most_versions = sum(sizes[stage] for stage in held), 1
        for stage, op, number, _ in with_updates(schedule, rank):
            if op in (Op.B, Op.W):
                del wanted[stage][number]
            elif op is Op.STEP:
                assert number == newest[stage]
                newest[stage] += 1
                exist = {s: {newest[s], *(v for v in wanted[s].values() if v < newest[s])} for s in held}
                most = max(most, sum(sizes[s] * len(exist[s]) for s in held))
                most_versions = max(most_versions, *map(len, exist.values()))
        assert newest == {stage: num_updates(schedule, stage) for stage in held}
        assert check(schedule).weight_versions[rank] == most_versions
        most_bytes.append(most)
    assert weight_version_bytes(schedule, sizes) == pytest.approx(most_bytes)


def test_a_version_is_freed_behind_the_last_backward_that_uses_it():
    schedule = stream("stash", (1, 1), 3)
    last = last_uses(schedule, 0, versions_used(schedule))
    assert {key: str(action) for key, action in last.items()} == {(0, 0): "0B1", (0, 1): "0B2"}


# --- time ------------------------------------------------------------------------------------------------------------

TIMES = ((1.0, 2.0), (0.3, 0.7), (2.0, 1.0), (1.0, 1.0))


def period(schedule: Schedule, forward: list[float], backward: list[float], **other: float) -> float:
    costs = Costs.per_stage(forward=forward, backward=backward, other={Op(op): s for op, s in other.items()})
    timeline = simulate(lower(schedule), costs)
    shares = [len(ranks) for ranks in schedule.placement.replicas]
    busiest = max((f + b) / r for f, b, r in zip(forward, backward, shares, strict=True))
    assert timeline.ideal_period_seconds == pytest.approx(busiest)
    if not other:
        assert simulate(schedule, costs).period_seconds == pytest.approx(timeline.period_seconds)
    return timeline.period_seconds / busiest


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2), (2, 1, 1), (2, 2), (3, 1), (4, 2, 1), (1,), (1, 1, 1, 1)])
@pytest.mark.parametrize("kind", ["stash", "vertical"])
def test_in_the_steady_state_the_busiest_stage_never_idles(replicas, kind):
    schedule = stream(kind, replicas, 20)
    for forward, backward in TIMES:
        balanced = [forward * r for r in replicas], [backward * r for r in replicas]
        equal = [forward] * len(replicas), [backward] * len(replicas)
        first_heavy = (
            [forward, *(forward / 3 for _ in replicas[1:])],
            [backward * (s + 1) for s in range(len(replicas))],
        )
        for times in (balanced, equal, first_heavy):
            assert period(schedule, *times) == pytest.approx(1.0), times


@pytest.mark.parametrize("replicas", [(1, 2, 1), (2, 3, 1)])
def test_some_replicas_need_one_more_in_flight_to_be_all_busy(replicas):
    """What is in flight on a stage is whole turns of its replicas; the stage before may admit too few for that."""
    times = [1.0 * r for r in replicas], [2.0 * r for r in replicas]
    assert period(stream("stash", replicas, 20), *times) > 1.1
    one_more = ceil(sum(replicas) / replicas[0]) + 1
    assert period(stream("stash", replicas, 20, in_flight=one_more), *times) == pytest.approx(1.0)


def test_updates_take_their_time_once_an_update():
    for p, each in ((1, 1), (4, 1), (4, 4), (3, 2)):
        schedule = stream("stash", (1,) * p, 24 // each, each)
        assert period(schedule, [1.0] * p, [2.0] * p, STEP=0.6) == pytest.approx((3.0 + 0.6 / each) / 3.0)


def test_a_stream_takes_the_time_of_1f1b_and_its_start_up_and_drain_are_its_bubble():
    costs = Costs.uniform()
    flushed = simulate(build("1f1b", num_ranks=4, num_microbatches=16), costs)
    timeline = simulate(build("pipedream", num_ranks=4, num_microbatches=16), costs)
    assert (timeline.makespan, timeline.bubble_fraction) == (flushed.makespan, flushed.bubble_fraction)
    assert (flushed.is_stream, flushed.period_seconds) == (False, flushed.makespan / 16)
    assert (timeline.is_stream, timeline.period_seconds) == (True, 3.0)
    assert simulate(build("pipedream", num_ranks=4, num_microbatches=4), costs).period_seconds is None


def test_a_slow_replica_sets_the_pace():
    schedule = stream("stash", (2, 1), 20)
    costs = replace(Costs.per_stage(forward=[2.0, 0.5], backward=[4.0, 1.0]), rank_slowness=(1.0, 2.0, 1.0))
    timeline = simulate(lower(schedule), costs)
    assert timeline.period_seconds == pytest.approx(6.0)
    assert timeline.ideal_period_seconds == pytest.approx(6.0)


@pytest.mark.parametrize("replicas", [(1,) * 16, (4, 2, 1), (2, 3, 3)])
def test_large_streams_are_checked_and_timed_by_their_columns(replicas):
    updates = 4100 // lcm(*replicas) // (1 if len(replicas) == 3 else 8)
    schedule = stream("stash", replicas, updates)
    assert schedule.large
    assert schedule.proof is not None
    copied = replace(schedule, orders=tuple(tuple(order) for order in schedule.orders))
    for each in (schedule, copied, from_json(to_json(schedule))):
        used = versions_used(each)
        assert all(v == newest_by_counting(s, b, replicas, 1, None) for (s, b), v in used.items())
        assert len(used) == schedule.num_stages * schedule.num_microbatches
    small = stream("stash", replicas, 40)
    assert check(schedule).weight_versions == check(small).weight_versions
    timeline = simulate(schedule, Costs.uniform())
    assert timeline.period_seconds == pytest.approx(simulate(small, Costs.uniform()).period_seconds)
    assert timeline.weight_versions == check(small).weight_versions


# --- programs --------------------------------------------------------------------------------------------------------


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
                    ScheduleError, match=rf"rank {rank} runs .* where .* has to stand: updates"
                ) as caught:
                    check(edited(program, rank, each))
                assert "\n" not in str(caught.value)
    assert tried > 50


def test_an_update_with_another_number_is_refused():
    program = lower(stream("stash", (1, 1), 4))
    order = [a._replace(microbatch=a.microbatch + 1) if a.op is Op.STEP else a for a in program.orders[0]]
    with pytest.raises(ScheduleError, match="runs 0STEP1 where 0STEP0 has to stand"):
        check(edited(program, 0, order))


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
    with pytest.raises(ScheduleError, match="hold the same parameters and update them at different times"):
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
        ("pipedream", {"weights": "mean"}, "weights are 'mean': pipedream has 'stash' and 'vertical'"),
        ("pipedream", {"replicas": (2, 1)}, r"replicas \[2, 1\] on 4 ranks: .* together they are all ranks"),
        ("pipedream", {"replicas": (4, 0)}, "every stage has at least 1"),
        ("pipedream", {"replicas": (2.0, 2)}, "every stage has at least 1"),
        ("pipedream", {"replicas": (3, 1)}, "8 micro-batches, and stage 0 with 3 replicas .* take a multiple of 3"),
        ("pipedream", {"microbatches_per_update": 3}, "stage 0 with 1 replicas updates after every 3"),
        ("pipedream", {"microbatches_per_update": 0}, "0 micro-batches an update"),
        ("pipedream", {"microbatches_per_update": "2"}, "'2' micro-batches an update"),
        ("pipedream", {"num_in_flight": 3}, "3 micro-batches in flight: .* need at least 4"),
        ("pipedream", {"num_in_flight": 0}, "0 in flight"),
        ("pipedream-2bw", {"microbatches_per_update": 2}, "keeps two versions, too few .* take 3$"),
        ("pipedream-2bw", {"microbatches_per_update": 0}, "0 micro-batches an update"),
        ("pipedream-2bw", {"weights": "stash"}, "weights stash: schedule 'pipedream-2bw' has none; .* use pipedream$"),
        ("1f1b", {"replicas": (2, 2)}, "replicas .*: schedule '1f1b' has none; .* use pipedream, pipedream-2bw$"),
        ("search", {"num_in_flight": 4}, "schedule 'search' has none"),
        ("mine.csv", {"weights": "stash"}, "weights with schedule 'mine.csv': the file says it"),
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
    with pytest.raises(ScheduleError, match="slices run under 'flush' alone"):
        check(replace(flushed, weights=WeightPolicy.STASH, microbatches_per_update=1))
    early = replace(
        build("gpipe", num_ranks=2, num_microbatches=8), weights=WeightPolicy.DOUBLE_BUFFER, microbatches_per_update=2
    )
    with pytest.raises(ScheduleError, match=r"0F4 uses version 1 .* stands before the update"):
        check(early)


# --- bytes and pictures ----------------------------------------------------------------------------------------------


def test_bytes_of_versions_are_versions_times_parameters():
    costs = replace(Costs.uniform(), parameter_bytes=(10.0, 20.0, 30.0), activation_bytes=(1.0, 1.0, 1.0))
    timeline = simulate(stream("stash", (1, 1, 1), 9), costs)
    assert timeline.weight_version_bytes == (30.0, 40.0, 30.0)
    assert timeline.peak_bytes == (3.0, 2.0, 1.0)
    flushed = simulate(build("1f1b", num_ranks=3, num_microbatches=9), costs)
    assert flushed.weight_version_bytes == (10.0, 20.0, 30.0)
    assert simulate(stream("stash", (1, 1, 1), 9), Costs.uniform()).weight_version_bytes is None
    with pytest.raises(InputError, match=r"parameter_bytes has 3 entries: .* has 2 stages; give one for each"):
        simulate(stream("stash", (1, 1), 9), replace(costs, activation_bytes=None))
    with pytest.raises(InputError, match="parameter_bytes is -1"):
        replace(costs, parameter_bytes=(-1.0,))


def test_pictures_show_updates_and_versions():
    schedule = stream("stash", (2, 1), 4)
    for seconds in (0.0, 0.5):
        timeline = simulate(lower(schedule), Costs.uniform(other={Op.STEP: seconds, Op.REDUCE_GRAD: seconds}))
        svg = timeline_svg([timeline])
        assert svg.count("STEP0 on rank") == 3
        assert "update of parameters" in svg
        used = versions_used(schedule)
        for (stage, b), version in used.items():
            for op in "FB":
                assert f"<title>{stage}{op}{b} on rank" in svg
                assert (
                    f", version {version}</title>" in svg.split(f"<title>{stage}{op}{b} on rank")[1].split("<rect")[0]
                )
        args = [event["args"] for event in trace(timeline)["traceEvents"] if event["ph"] == "X"]
        found = {(a["stage"], a["microbatch"]): a["version"] for a in args if a["action"][1] in "FB"}
        assert found == used
        steps = [a for a in args if "STEP" in a["action"]]
        assert len(steps) == 2 * 4 + 8
        assert all(a["version"] == a["update"] + 1 and "microbatch" not in a for a in steps)


def test_a_timeline_that_was_cut_has_no_versions():
    timeline = simulate(stream("stash", (1, 1), 4), Costs.uniform())
    cut = replace(timeline, spans=tuple(row[:3] for row in timeline.spans))
    assert cut.versions_used == {}
    timeline_svg([cut])


def test_placements_of_streams_are_those_of_round_robin():
    schedule = stream("stash", (2, 1), 4)
    assert schedule.placement == Placement.replicated([2, 1])
    assert Action(0, Op.F, 3) in schedule.orders[1]
