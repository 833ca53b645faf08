"""Pages and run reports: complete, one file each, and never loading anything from elsewhere."""

from __future__ import annotations

import gzip
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeloom import schedules
from pipeloom.errors import InputError
from pipeloom.passes import lower
from pipeloom.report import simulation_html, trace, write_report
from pipeloom.report.line_chart import Series, line_chart
from pipeloom.sim import Costs, Timeline, measured_timeline, simulate


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
    pipelines = [schedules.build(name, num_ranks=3, num_microbatches=4) for name in ("1f1b", "gpipe")]
    text = page_of(simulation_html([simulate(pipeline, Costs.uniform()) for pipeline in pipelines]))
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
        "steps 1 to 20; schedule 1f1b on 2 ranks, 4 micro-batches per step",
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


def test_a_step_that_ran_twice_counts_once_and_a_truncated_line_is_reported(tmp_path):
    directory = run_directory(tmp_path / "run", [*METRICS[:10], {**METRICS[4], "loss": 4.0}, *METRICS[5:8]])
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    text = page_of(write_report(directory).read_text(encoding="utf-8"))
    assert "steps 1 to 10" in text
    assert "is incomplete" in text


def test_what_cannot_be_reported_is_refused_in_one_line(tmp_path):
    def refused(directory: Path, message: str) -> None:
        with pytest.raises(InputError, match=message) as caught:
            write_report(directory)
        assert "\n" not in str(caught.value)

    refused(tmp_path / "nowhere", "is not a directory")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a directory")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "metrics.jsonl: No such file")
    refused(run_directory(tmp_path / "nothing", []), "has no training steps")
    refused(run_directory(tmp_path / "evaluations", [{"step": 1, "eval_loss": 1.0}]), "has no training steps")
    broken = run_directory(tmp_path / "broken", METRICS[:3])
    (broken / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\nloss 2\n{"step": 3, "loss": 1.0}\n')
    refused(broken, "line 2: must be a JSON object with a step")
    binary = run_directory(tmp_path / "binary", [])
    (binary / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    refused(binary, "not UTF-8 text")
    for text in ("", "[]", '{"measured": {}}', '{"measured": 3}'):
        damaged = run_directory(tmp_path / "damaged", METRICS)
        (damaged / "timelines.json").write_text(text)
        refused(damaged, "has no valid timelines")
    for text in ("", "garbage", "a: [", "- 1"):
        damaged = run_directory(tmp_path / "damaged", METRICS)
        (damaged / "timelines.json").unlink(missing_ok=True)
        (damaged / "config.yaml").write_text(text)
        refused(damaged, r"config\.yaml is not a configuration")
