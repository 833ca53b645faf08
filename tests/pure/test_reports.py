"""Pictures, traces and run reports: read back, counted, and never loading anything from elsewhere."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.ir import Op
from pipeloom.passes import lower
from pipeloom.report import print_timeline, simulation_html, timeline_svg, trace, write_report, write_trace
from pipeloom.report.drawing import bytes_text, number_text, op_shares, seconds_text, ticks
from pipeloom.report.plots import Series, line_chart
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
    assert "too long for numbers" in "\n".join(lines)
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
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in found)


def test_a_chart_shows_what_is_no_number():
    points = [(1.0, 2.0), (2.0, math.nan), (3.0, 1.0), (4.0, math.inf), (5.0, 1.5)]
    svg = line_chart([Series(label="loss", points=points)])
    assert svg.count('class="bad"') == 2
    assert "loss at 2: NaN" in svg
    assert svg.count("M") - svg.count("M5") >= 3  # the line begins anew after each gap
    assert "no finite value" in line_chart([Series(label="loss", points=[(1.0, math.nan)])])


def test_a_chart_of_many_points_keeps_every_spike_and_every_nan():
    points = [(float(x), 1.0) for x in range(100_000)]
    points[54_321] = (54_321.0, 99.0)
    points[77_777] = (77_777.0, math.nan)
    svg = line_chart([Series(label="loss", points=points)])
    assert len(svg) < 60_000
    assert svg.count('class="bad"') == 1
    assert ">100</text>" in svg or ">90</text>" in svg or ">80</text>" in svg


# --- pages ----------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks that tags match and that nothing is loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "hr", "img", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object", "embed")
        for name, value in attributes:
            assert name not in ("src", "href", "srcset"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page_of(text: str) -> str:
    assert "@import" not in text
    assert "url(" not in text
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    return Page(text).text


def test_a_simulation_page_stands_alone():
    text = page_of(simulation_html([timeline_of(ranks=3, microbatches=4), timeline_of("gpipe", 3, 4)]))
    assert "1f1b and gpipe" in text
    assert "bubble 33.3 %" in text
    assert "Makespan 18 s" in text


METRICS = [
    {
        "step": step,
        "loss": 5.0 - 0.1 * step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens_per_second": 9000.0,
        "step_seconds": 0.5,
        "bubble_fraction": 0.14,
        "predicted_bubble_fraction": 0.11,
        "peak_memory_bytes": [300 * 2**20, 200 * 2**20],
        "live_activations": [2, 1],
    }
    for step in range(1, 21)
]


def run_directory(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def add_timelines(directory: Path) -> Timeline:
    program = lower(schedules.one_f_one_b(num_ranks=2, num_microbatches=4))
    predicted = simulate(program, Costs.uniform(forward=0.01, backward=0.02))
    measured = measured_timeline(program, [[(a, s * 1.1 + 7, e * 1.1 + 7) for a, s, e in r] for r in predicted.spans])
    both = {"measured": json.loads(measured.to_json()), "predicted": json.loads(predicted.to_json())}
    (directory / "timelines.json").write_text(json.dumps(both))
    return measured


def test_a_report_of_a_whole_run(tmp_path):
    directory = run_directory(tmp_path / "my-run", [*METRICS, {"step": 20, "eval_loss": 3.25}])
    (directory / "config.yaml").write_text("schedule: 1f1b\nnote: <b>&amp;</b>\n")
    (directory / "environment.json").write_text('{"torch": "9.9.9", "host": "<laptop>"}')
    measured = add_timelines(directory)
    assert write_report(directory) == directory / "report.html"
    text = page_of((directory / "report.html").read_text(encoding="utf-8"))
    for expected in (
        "my-run",
        "steps 1 to 20; schedule 1f1b on 2 ranks, 4 micro-batches a step",
        "validation loss 3.25 best 3.25 at step 20",
        "bubble 14.0 % median; predicted 11.0 %",
        "measured: 165 ms, bubble 20.0 %",
        "predicted: 150 ms, bubble 20.0 %",
        "300 MiB",
        "200 MiB",
        "note: <b>&amp;</b>",
        "torch 9.9.9 host <laptop>",
    ):
        assert expected in text, expected
    assert "not finite" not in text
    stored = json.loads(gzip.decompress((directory / "timeline.json.gz").read_bytes()))
    assert stored == trace(measured)


def test_a_report_of_metrics_alone_says_what_is_missing(tmp_path):
    directory = run_directory(tmp_path / "run", [{"step": 1, "loss": 2.0}])
    text = page_of(write_report(directory).read_text(encoding="utf-8"))
    assert "recorded no timeline" in text
    assert "config.yaml is not in this directory" in text
    assert not (directory / "timeline.json.gz").exists()


@pytest.mark.parametrize("bad", [math.nan, None, math.inf, "NaN"])
def test_losses_that_are_no_numbers_are_shown(tmp_path, bad):
    rows = [dict(row) for row in METRICS]
    rows[6]["loss"] = rows[8]["loss"] = bad
    page = write_report(run_directory(tmp_path / "run", rows)).read_text(encoding="utf-8")
    assert "The training loss was not finite at steps 7, 9" in page_of(page)
    assert page.count('class="bad"') == 2


def test_a_run_of_nothing_but_nan_is_reported(tmp_path):
    rows = [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.nan}]
    text = page_of(write_report(run_directory(tmp_path / "run", rows)).read_text(encoding="utf-8"))
    assert "not finite at steps 1, 2" in text
    assert "no finite value to draw" in text


def test_a_step_that_ran_twice_counts_once_and_a_torn_line_is_told(tmp_path):
    directory = run_directory(tmp_path / "run", [*METRICS[:10], {**METRICS[4], "loss": 4.0}, *METRICS[5:8]])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    text = page_of(write_report(directory).read_text(encoding="utf-8"))
    assert "steps 1 to 10" in text
    assert "cut off" in text


def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path):
    def refused(directory: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            write_report(directory)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "is no directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is no directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "metrics.jsonl: No such file")
    refused(run_directory(tmp_path / "nothing", []), "has no training steps")
    refused(run_directory(tmp_path / "evaluations", [{"step": 1, "eval_loss": 1.0}]), "has no training steps")
    broken = run_directory(tmp_path / "broken", METRICS[:3])
    (broken / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\nloss 2\n{"step": 3, "loss": 1.0}\n')
    refused(broken, "line 2 is no JSON object with a step")
    binary = run_directory(tmp_path / "binary", [])
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    refused(binary, "no UTF-8 text")
    for text in ("", "[]", '{"measured": {}}', '{"measured": 3}'):
        damaged = run_directory(tmp_path / "damaged", METRICS)
        (damaged / "timelines.json").write_text(text)
        refused(damaged, "holds no timelines")
