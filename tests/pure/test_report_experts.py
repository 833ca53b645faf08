"""Experts in run reports: heat maps of load and curves of what routers observe."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeloom.report.experts import expert_curves, expert_layers, expert_maps
from pipeloom.report.heat_map import heat_map
from pipeloom.report.html import write_report


def row(step: int, load: list, **more) -> dict:
    layer = {"load": load, "dropped": 0.01 * step, "entropy": 2.0, "balance_loss": 1.0 + 0.1 * step, **more}
    return {"step": step, "loss": 3.0, "experts": {"blocks.1.experts": layer, "blocks.3.experts": {"load": load[::-1]}}}


def shades(svg: str) -> list[tuple[float, str]]:
    """Opacity and drawn boxes of each shade."""
    paths = ElementTree.fromstring(svg).iter("path")
    return [(float(each.get("fill-opacity", 0)), each.get("d", "")) for each in paths if each.get("class") == "heat"]


def test_a_heat_map_draws_runs_of_one_shade():
    found = heat_map("two experts", [1, 2, 3, 4], [[1.0, 1.0, 2.0, 5.0], [0.0, math.nan, 1.0, 0.5]], width=468.0)
    wide = 100.0  # of a column
    boxes = {level: re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", d) for level, d in shades(found)}
    assert boxes == {
        0.25: [("354.0", "100.0")],
        0.5: [("54.0", f"{2 * wide}"), ("254.0", "100.0")],
        1.0: [("254.0", f"{2 * wide}")],
    }
    assert "expert 0: mean 2.25, 1 to 5" in found


def test_columns_are_means_of_their_steps():
    found = heat_map("one", list(range(100)), [[0.0, 2.0] * 50], columns=10)
    assert [level for level, _ in shades(found)] == [0.5]


def test_a_report_has_heat_maps_and_curves_of_experts(tmp_path: Path):
    rows = [row(step, [3.0, 1.0, 0.0, None]) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    page = write_report(tmp_path).read_text()
    assert "<h2>Experts</h2>" in page
    assert page.count('class="heat"') >= 2
    assert "blocks.3.experts" in page
    assert "busiest expert at the end: 2.25 of the mean; 5.0 % dropped" in page
    for title in ("dropped assignments", "entropy of the router", "balance loss"):
        assert f"<h3>{title}</h3>" in page
    assert "<h3>z-loss</h3>" not in page


@pytest.mark.parametrize("experts", [None, [], {}, {"a": None}, {"a": {"load": 3}}, {"a": {"load": [None]}}])
def test_steps_without_experts_have_no_section(tmp_path: Path, experts):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 3.0, "experts": experts}) + "\n")
    assert "heat" not in write_report(tmp_path).read_text().partition("</style>")[2]


def test_large_mixtures_stay_small_pages():
    steps = [
        {
            "step": step,
            "experts": {f"blocks.{k}": {"load": [1.0 + (step * e + k) % 7 for e in range(64)]} for k in range(32)},
        }
        for step in range(300)
    ]
    maps = expert_maps(expert_layers(steps))
    assert len(maps) == 32
    assert sum(len(each["svg"]) for each in maps) < 4e6
    assert not expert_curves(expert_layers(steps))
