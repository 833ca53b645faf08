"""Timelines in the terminal, as SVG and as traces: read back and counted."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeloom import schedules
from pipeloom.common.quantities import bytes_text, number_text, seconds_text
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Op
from pipeloom.passes import insert_offload, lower
from pipeloom.report import print_timeline, timeline_svg, trace, write_trace
from pipeloom.report.drawing import op_shares, ticks
from pipeloom.report.terminal import layout
from pipeloom.sim import Costs, Network, Timeline, measured_timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str = "1f1b", ranks: int = 2, microbatches: int = 4, **network) -> Timeline:
    schedule = schedules.build(name, num_ranks=ranks, num_microbatches=microbatches)
    return simulate(lower(schedule) if network else schedule, Costs.uniform(), Network(**network))


def printed(timeline: Timeline, **console) -> list[str]:
    out = io.StringIO()
    print_timeline(timeline, Console(file=out, highlight=False, **console))
    return out.getvalue().splitlines()


# --- terminal -------------------------------------------------------------------------------------------------------


def test_without_colours_a_timeline_is_letters():
    lines = printed(timeline_of(ranks=3, microbatches=4))
    assert lines[:3] == [
        "rank 0  F0 F1 F2             B0--- F3 B1---    B2---    B3---",
        "rank 1     F0 F1       B0--- F2 B1--- F3 B2---    B3---",
        "rank 2        F0 B0--- F1 B1--- F2 B2--- F3 B3---",
    ]
    text = "\n".join(lines)
    assert "\x1b" not in text
    assert re.search(r"makespan +18 s +bubble 33\.33 %", text)


def test_with_colours_forwards_and_backwards_differ():
    text = "\n".join(printed(timeline_of(), force_terminal=True, color_system="truecolor", width=80))
    assert "48;2;86;180;233" in text
    assert "48;2;230;159;0" in text


def test_a_user_who_wants_no_colour_gets_letters(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(timeline_of(), force_terminal=True, width=120)[0].startswith("rank 0  F0 F1")


def test_a_schedule_too_long_to_draw_is_summarised():
    timeline = timeline_of(ranks=4, microbatches=3000)
    lines = printed(timeline)
    assert max(map(len, lines)) <= 180
    assert "too many actions for numbers" in "\n".join(lines)
    assert len(printed(timeline_of("gpipe", ranks=100, microbatches=2))) < 90
    assert any("68 more ranks" in line for line in printed(timeline_of("gpipe", ranks=100, microbatches=2)))


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(["naive", "gpipe", "1f1b"]), st.integers(1, 6), st.integers(1, 40), st.integers(8, 200))
def test_no_row_is_wider_than_asked_and_every_action_is_there_where_it_fits(name, ranks, microbatches, columns):
    timeline = timeline_of(name, ranks, microbatches)
    for letters in (True, False):
        rows, numbered = layout(timeline, columns, letters=letters)
        for cells, row in zip(rows, timeline.compute_spans, strict=True):
            assert sum(len(text) for text, _ in cells) <= columns
            if numbered:
                assert [op for _, op in cells if op is not None] == [span.action.op for span in row]


def test_a_pipeline_that_takes_no_time_is_printed_too():
    schedule = schedules.gpipe(num_ranks=2, num_microbatches=2)
    assert printed(simulate(schedule, Costs.uniform(forward=0.0, backward=0.0)))


# --- SVG ------------------------------------------------------------------------------------------------------------


def boxes(svg: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """For each tooltip's action, its x and width."""
    found: dict[str, list[tuple[float, float]]] = {}
    for rect in svg.iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found.setdefault(title.text.split()[0], []).append((float(rect.get("x")), float(rect.get("width"))))
    return found


def test_the_picture_has_every_action_at_its_place():
    timeline = timeline_of(ranks=3, microbatches=5)
    found = boxes(ElementTree.fromstring(timeline_svg([timeline], standalone=True)))
    assert len(found) == 30
    scale = (found["0B4"][0][0] - found["0F0"][0][0]) / timeline.spans[0][-1].start
    for row in timeline.spans:
        for action, start, end in row:
            ((x, width),) = found[str(action)]
            assert x == pytest.approx(found["0F0"][0][0] + start * scale, abs=0.02)
            assert width == pytest.approx((end - start) * scale, abs=1.0)


def test_two_timelines_have_one_scale():
    fast, slow = timeline_of(), timeline_of("naive")
    found = boxes(ElementTree.fromstring(timeline_svg([fast, slow])))
    assert found["0F0"][0] == pytest.approx(found["0F0"][1])


def test_the_picture_of_a_long_schedule_stays_small():
    svg = timeline_svg([timeline_of(ranks=4, microbatches=4000)])
    assert len(svg) < 400_000
    ElementTree.fromstring(svg)
    longer = timeline_svg([timeline_of(ranks=8, microbatches=200)])
    assert len(longer) < 400_000
    ElementTree.fromstring(longer)


def test_waits_reductions_and_split_backwards_are_drawn():
    schedule = schedules.one_f_one_b(num_ranks=2, num_microbatches=3)
    split = replace(
        schedule,
        orders=tuple(
            tuple(part for a in order for part in ((a.with_op(Op.I), a.with_op(Op.W)) if a.op is Op.B else (a,)))
            for order in schedule.orders
        ),
    )
    program = lower(split, tied_stages=((0, 1),))
    timeline = simulate(program, Costs.uniform(other={Op.REDUCE_GRAD: 1.0}), Network(latency_seconds=0.5))
    svg = timeline_svg([timeline])
    for style in ("F", "I", "W", "REDUCE_GRAD", "wait"):
        assert f'class="{style}"' in svg
    assert 'class="B"' not in svg
    assert any("I0" in line for line in printed(timeline))


def test_overlapped_pairs_are_framed_where_simulated_and_where_measured():
    program = lower(schedules.dualpipev(num_ranks=2, num_microbatches=4))
    predicted = simulate(program, Costs.uniform())
    measured = measured_timeline(program, predicted.spans)
    pairs = program.schedule.overlapped
    assert pairs
    for timeline in (predicted, measured):
        assert Timeline.from_json(timeline.to_json()) == timeline
        assert timeline.schedule.overlapped == pairs
        assert timeline_svg([timeline]).count('class="unit"') == len(pairs) + 1  # and the legend
    assert 'class="unit"' not in timeline_svg([timeline_of()])


def test_pictures_with_one_number_of_seconds_have_one_scale():
    fast, slow = (timeline_svg([timeline_of(name)], seconds=100) for name in ("gpipe", "naive"))
    first, second = (boxes(ElementTree.fromstring(svg))["0F0"] for svg in (fast, slow))
    assert first[0] == pytest.approx(second[0])


def test_shares_of_a_column_add_up_to_what_ran_in_it():
    timeline = timeline_of(ranks=3, microbatches=7)
    for columns in (1, 5, 27, 1000):
        for row, busy in zip(timeline.spans, timeline.busy_seconds, strict=True):
            shares = op_shares(row, timeline.makespan, columns)
            assert sum(sum(share.values()) for share in shares) * timeline.makespan / columns == pytest.approx(busy)
            assert all(sum(share.values()) <= 1 + 1e-9 for share in shares)


# --- trace ----------------------------------------------------------------------------------------------------------


def test_the_trace_has_a_process_for_each_rank_and_slices_that_nest():
    timeline = timeline_of(ranks=3, microbatches=5, latency_seconds=0.1, send_seconds=0.03)
    events = trace(timeline)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(map(len, timeline.spans))
    for rank in range(3):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["pid"] == rank)
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(own))
    first = next(e for e in slices if e["args"]["action"] == "1B2")
    span = next(span for span in timeline.spans[1] if str(span.action) == "1B2")
    assert first["ts"] == pytest.approx(span.start * 1e6)
    assert first["dur"] == pytest.approx(2e6)
    assert first["args"] == {"action": "1B2", "stage": 1, "microbatch": 2}
    colours = {e["name"][0]: e["cname"] for e in slices if e["cat"] == "compute"}
    assert colours["F"] != colours["B"]


def with_collectives(dense: int = 1) -> Timeline:
    """A measured step of 2 ranks, with collectives inside every action."""
    timeline = timeline_of(ranks=2, microbatches=2)
    rows = [[(span.action, 10 + span.start, 10 + span.end) for span in row] for row in timeline.spans]
    inside = [
        [("tp", "all_reduce", start + k / dense * (end - start), start + (k + 0.5) / dense * (end - start), 2048)
         for _, start, end in row for k in range(dense)]
        for row in rows
    ]  # fmt: skip
    before = ("tp", "broadcast", 1.0, 2.0, 8)  # ended before the first action
    return measured_timeline(timeline.schedule, rows, collectives=[[before, *inside[0]], inside[1]])


def test_collectives_inside_actions_have_a_track_and_a_strip():
    timeline = with_collectives()
    assert Timeline.from_json(timeline.to_json()) == timeline
    assert "collectives" not in json.loads(timeline_of().to_json())
    assert [len(row) for row in timeline.collectives] == [4, 4]
    for row, spans in zip(timeline.collectives, timeline.compute_spans, strict=True):
        for each, span in zip(row, spans, strict=True):
            assert span.start == pytest.approx(each.start)
            assert each.end < span.end
    slices = [event for event in trace(timeline)["traceEvents"] if event.get("cat") == "collective"]
    assert [event["name"] for event in slices] == ["tp all_reduce"] * 8
    assert {event["tid"] for event in slices} == {1}
    assert slices[0]["args"] == {"bytes": 2048}
    picture = timeline_svg([timeline])
    assert picture.count('<rect class="collective"') == 8 + 1  # and the legend
    assert "all_reduce along tp: 500 ms, 2 KiB sent" in picture
    many = timeline_svg([with_collectives(dense=1000)])
    (strip, _) = re.findall('<path class="collective" d="([^"]+)"', many)
    heights = [float(x) for x in re.findall(r"M[\d.]+ ([\d.]+)h", strip)]
    assert len(heights) > 100
    assert max(heights) - min(heights) < 0.5, "each column is half full"
    assert len(many) < 100_000


def test_arrows_go_from_the_producer_to_its_consumer():
    timeline = timeline_of(ranks=3, microbatches=5, latency_seconds=0.1)
    events = trace(timeline)["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * (3 - 1) * 5
    slices = [e for e in events if e["ph"] == "X"]

    def around(arrow):
        return next(e for e in slices if e["pid"] == arrow["pid"] and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"])

    for number, start in starts.items():
        producer, consumer = around(start)["args"], around(ends[number])["args"]
        step = 1 if start["name"] == "activation" else -1
        assert consumer["stage"] == producer["stage"] + step
        assert consumer["microbatch"] == producer["microbatch"]
        assert ends[number]["bp"] == "e"
        assert start["ts"] <= ends[number]["ts"]


def test_the_trace_is_written_plain_or_compressed_and_the_same_each_time(tmp_path):
    timeline = timeline_of()
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_trace(timeline, tmp_path / name)
    plain = json.loads((tmp_path / "a.json").read_text())
    assert plain == json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes())) == trace(timeline)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


# --- numbers for people ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (4.0, "4"), (33, "33"), (0.27272, "0.2727"), (12345.6, "12,346"), (1e9, "1e+09"), (2e-5, "2e-05")],
)
def test_numbers_have_four_digits(value, text):
    assert number_text(value) == text


def test_units():
    assert [seconds_text(s) for s in (0.0, 2.5e-6, 0.0123, 1.0, 75.0)] == ["0 s", "2.5 µs", "12.3 ms", "1 s", "75 s"]
    assert [bytes_text(b) for b in (0, 1023, 2048, 3 * 2**20, 5 * 2**40)] == [
        "0 B",
        "1,023 B",
        "2 KiB",
        "3 MiB",
        "5 TiB",
    ]
    assert [number_text(x) for x in (math.nan, math.inf, -math.inf)] == ["NaN", "∞", "-∞"]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 12))
def test_ticks_are_few_and_inside(low, width, count):
    found = ticks(low, low + width, count)
    assert len(found) <= 2 * count + 2
    slack = width * 1e-6 + 4 * math.ulp(abs(low) + width)  # a narrow range of large numbers has few floats in it
    assert all(low - slack <= tick <= low + width + slack for tick in found)


# --- links beside the ranks -----------------------------------------------------------------------------------------


def beside_timeline() -> Timeline:
    """One rank with two chunks of two micro-batches, four copies, one activation that leaves."""
    data = DataAxis(degree=4, strategy=DataStrategy.ZERO3, granularity=Granularity.CHUNK)
    schedule = schedules.build("bfs", num_ranks=1, num_microbatches=2, num_chunks=2)
    program = insert_offload(lower(schedule, data=data), 3)
    costs = replace(Costs.uniform(), parameter_bytes=(8.0, 8.0), activation_bytes=(2.0, 2.0))
    return simulate(program, costs, Network(data_bytes_per_second=8.0, memory_bytes_per_second=4.0))


def test_links_are_drawn_on_lanes_of_their_own():
    timeline = beside_timeline()
    assert timeline.links == ("data", "memory")
    rows = printed(timeline)
    # a gather takes 0.75 s, F 0.5 s in three columns; 0F1 leaves when it has ended and is back before its backward
    assert rows[:3] == [
        "rank 0         F0 F1 F0 F1 B0--- B1--- B0--- B1---",
        "  data    U0---U1--  U0--              R1--        R0--",
        "  memory             O0-               L0-",
    ]
    assert "R  gradient reduction   U  parameter all-gather   O  activation offload" in "\n".join(rows)
    found = boxes(ElementTree.fromstring(timeline_svg([timeline], standalone=True)))
    for span in timeline.background[0]:
        assert str(span.action) in found
    events = trace(timeline)["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    assert tracks == {0: "actions", 1: "data link", 2: "memory link"}
    names = {(e["tid"], e["args"]["action"]) for e in events if e["ph"] == "X" and e["tid"]}
    assert names == {(1 + (s.action.op in (Op.OFFLOAD, Op.RELOAD)), str(s.action)) for s in timeline.background[0]}
    assert "data" not in "\n".join(printed(timeline_of(ranks=2, microbatches=2)))
