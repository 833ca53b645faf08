"""Streams in time: the steady period, bytes of weight versions, pictures, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil, lcm
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Op, Schedule, check
from pipeloom.ir.text import from_json, to_json
from pipeloom.ir.versions import versions_used
from pipeloom.ir.walk import proof_of
from pipeloom.passes import lower
from pipeloom.report import timeline_svg
from pipeloom.report.perfetto import trace
from pipeloom.report.terminal import layout
from pipeloom.schedules import build
from pipeloom.schedules.pipedream import full_in_flight
from pipeloom.sim import Costs, simulate
from tests.pure.test_streams import newest_by_counting, stream

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


def test_with_enough_in_flight_every_vector_of_replicas_reaches_the_period():
    vectors = [(1, 2, 1), (1, 3, 1), (1, 7, 1), (2, 3, 1), (1, 3, 2), (1, 1, 2, 1), (2, 1, 2, 1), (3, 2, 1), (4, 2, 1)]
    for replicas in vectors:
        times = [1.0 * r for r in replicas], [2.0 * r for r in replicas]
        assert period(stream("stash", replicas, 40, in_flight="full"), *times) == pytest.approx(1.0), replicas
        held = full_in_flight(replicas)
        checked = check(stream("stash", replicas, 40, in_flight="full"))
        ranks = [stage for stage, count in enumerate(replicas) for _ in range(count)]
        assert checked.live_activations == tuple(held[stage] for stage in ranks)
    for replicas in ((1,), (1, 1, 1), (2, 1), (1, 2), (2, 1, 1)):
        assert full_in_flight(replicas) == [ceil(sum(replicas[s:]) / r) for s, r in enumerate(replicas)]
    with pytest.raises(ScheduleError, match="noam, full, or a number"):
        stream("stash", (1, 1), 4, in_flight="more")


def test_replicas_that_waited_for_each_other_at_once_would_lose_throughput():
    program = lower(stream("stash", (2, 1, 1), 40))
    orders = []
    for rank, order in enumerate(program.orders):
        rest = [action for action in order if action.op is not Op.STEP or rank > 1]
        at_once = [[a, a._replace(op=Op.STEP, microbatch=a.microbatch // 2)] for a in rest if a.op is Op.REDUCE_GRAD]
        orders.append(tuple(b for a in rest for b in (at_once.pop(0) if a.op is Op.REDUCE_GRAD else [a])))
    costs = Costs.per_stage(forward=[2.0, 1.0, 1.0], backward=[4.0, 2.0, 2.0])
    assert simulate(program, costs).period_seconds == pytest.approx(3.0)
    assert simulate(replace(program, orders=tuple(orders)), costs).period_seconds == pytest.approx(4.5)


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
    assert proof_of(schedule) is not None
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


# --- bytes and pictures ----------------------------------------------------------------------------------------------


def test_bytes_of_versions_are_versions_times_parameters():
    costs = replace(Costs.uniform(), parameter_bytes=(10.0, 20.0, 30.0), activation_bytes=(1.0, 1.0, 1.0))
    timeline = simulate(stream("stash", (1, 1, 1), 9), costs)
    assert timeline.weight_version_bytes == (30.0, 40.0, 30.0)
    assert timeline.peak_bytes == (3.0, 2.0, 1.0)
    flushed = simulate(build("1f1b", num_ranks=3, num_microbatches=9), costs)
    assert flushed.weight_version_bytes == (10.0, 20.0, 30.0)
    assert simulate(stream("stash", (1, 1, 1), 9), Costs.uniform()).weight_version_bytes is None
    with pytest.raises(InputError, match=r"parameter_bytes has 3 entries: .* has 2 stages. Pass one entry per stage"):
        simulate(stream("stash", (1, 1), 9), replace(costs, activation_bytes=None))
    with pytest.raises(InputError, match=r"parameter_bytes\[[0-9]+\]=-1\.0: must be a number of bytes from 0"):
        replace(costs, parameter_bytes=(-1.0, 1.0, 1.0))


def test_pictures_show_updates_and_versions():
    schedule = stream("stash", (2, 1), 4)
    for seconds in (0.0, 0.5):
        timeline = simulate(lower(schedule), Costs.uniform(other={Op.STEP: seconds, Op.REDUCE_GRAD: seconds}))
        svg = timeline_svg([timeline])
        assert svg.count("STEP0 on rank") == 3
        assert "optimizer step" in svg
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


def test_updates_are_drawn_in_the_terminal():
    timeline = simulate(lower(stream("stash", (1, 1), 4)), Costs.uniform(other={Op.STEP: 1.0}))
    rows, numbered = layout(timeline, 200, letters=True)
    assert numbered
    for cells, row in zip(rows, timeline.spans, strict=True):
        drawn = [op for _, op in cells if op is not None]
        assert drawn == [s.action.op for s in row if s.action.op in (Op.F, Op.B, Op.STEP)]
    assert [text.strip(" -") for text, op in rows[1] if op is Op.STEP] == ["S0", "S1", "S2", "S3"]


# --- the command line ------------------------------------------------------------------------------------------------


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def answer_of(capsys, *words: str) -> dict:
    code, out, err = run(capsys, *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_streams_are_simulated_with_their_options(capsys):
    sizes = ["--ranks", "3", "--microbatches", "24"]
    answer = answer_of(capsys, "pipedream", *sizes)
    assert (answer["period_seconds"], answer["ideal_period_seconds"], answer["weight_versions"]) == (
        3.0,
        3.0,
        [3, 2, 1],
    )
    assert answer_of(capsys, "pipedream", *sizes, "--weights", "vertical")["weight_versions"] == [3, 3, 3]
    replicated = answer_of(capsys, "pipedream", *sizes, "--replicas", "2,1", "--in-flight", "3")
    assert replicated["peak_activations"] == [3, 3, 1]
    assert answer_of(capsys, "pipedream-2bw", *sizes)["weight_versions"] == [2, 2, 2]
    fewer = answer_of(capsys, "pipedream", *sizes, "--microbatches-per-update", "4")
    assert fewer["weight_versions"] == [2, 2, 1]
    short = answer_of(capsys, "pipedream", "--ranks", "3", "--microbatches", "3")
    assert short["period_seconds"] is None


def test_streams_are_compared_with_what_flushes(capsys):
    sizes = ["--ranks", "4", "--microbatches", "16"]
    answers = answer_of(capsys, "compare", "1f1b", "pipedream", "pipedream-2bw", *sizes, "--weights", "vertical")[
        "schedules"
    ]
    assert [each["period_seconds"] for each in answers] == [57 / 16, 3.0, 3.0]
    assert [each["weight_versions"][3] for each in answers] == [1, 4, 2]
    code, out, _ = run(capsys, "compare", "1f1b", "pipedream", *sizes)
    assert code == 0
    assert "3.562 s" in out
    assert "period" in out
    code, out, _ = run(capsys, "pipedream", *sizes)
    assert "including warm-up and cool-down" in out
    assert "steady-state period   3 s    per micro-batch, ideal 3 s" in out
    code, out, _ = run(capsys, "pipedream", "--ranks", "4", "--microbatches", "4")
    assert "stream too short" in out


def test_bytes_of_versions_come_from_the_costs_file(capsys, tmp_path):
    path = Path(tmp_path / "costs.json")
    stage = {"forward": 1, "backward_input": 1, "backward_weight": 1, "parameter_bytes": 8}
    path.write_text(json.dumps({"stages": [stage, stage | {"parameter_bytes": 10}]}))
    words = ["--ranks", "2", "--microbatches", "8", "--costs", str(path)]
    assert answer_of(capsys, "pipedream", *words)["weight_version_bytes"] == [16, 10]
    assert answer_of(capsys, "1f1b", *words)["weight_version_bytes"] == [8, 10]
    assert "peak of all parameter versions per rank 16 10 bytes" in run(capsys, "pipedream", *words)[1]
    path.write_text(json.dumps({"stages": [stage, {k: v for k, v in stage.items() if k != "parameter_bytes"}]}))
    assert "key 'parameter_bytes' is in only one of stages[0] and stages[" in run(capsys, "pipedream", *words)[2]


def test_pages_and_pictures_of_streams_are_written(capsys, tmp_path):
    files = [
        f"--{kind}={tmp_path}/out.{ending}" for kind, ending in (("svg", "svg"), ("html", "html"), ("trace", "json"))
    ]
    words = ["pipedream", "--ranks", "3", "--microbatches", "8", "--replicas", "2,1", "--critical-path", *files]
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert "In steady state" in (tmp_path / "out.html").read_text()
    assert "0STEP0 on rank 1" in (tmp_path / "out.svg").read_text()
    assert '"action":"0STEP0"' in (tmp_path / "out.json").read_text()
    code, _, err = run(capsys, "pipedream", "--ranks", "2", "--microbatches", "2", "--csv", str(tmp_path / "out.csv"))
    assert code == 2
    assert "several versions of the weights" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["1f1b", "--weights", "stash"],
            "weights=stash: schedule '1f1b' does not take it. Remove it, or use pipedream",
        ),
        (["search", "--replicas", "1,1,2"], "schedule 'search' does not take it"),
        (["compare", "1f1b", "gpipe", "--in-flight", "4"], "in_flight=4: schedule '1f1b' does not take it"),
        (["pipedream", "--replicas", "2,x"], "--replicas 2,x: must be the number of ranks per stage, such as 2,1,1"),
        (["pipedream", "--replicas", "2,1"], "replicas=[2, 1]: every stage must have at least 1"),
        (["pipedream", "--weights", "mean"], "weights='mean'"),
        (
            ["pipedream-2bw", "--microbatches-per-update", "2"],
            "too few for the in-flight micro-batches on replicas [1, 1, 1, 1]. Use 3",
        ),
        (["pipedream", "--microbatches-per-update", "3"], "Use a multiple of 3"),
        (
            ["mine.csv", "--weights", "stash"],
            "weights='stash': schedule 'mine.csv' is a file, which defines weights itself",
        ),
        (["pipedream", "--slices", "2"], "does not slice sequences"),
        (["search", "--slices", "2"], "does not slice sequences"),
        (["pipedream", "--chunks", "2"], "has 1 stage per rank"),
    ],
)
def test_bad_options_are_one_line(capsys, words, message):
    code, out, err = run(capsys, *words, "--ranks", "4", "--microbatches", "16")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
