"""The page of plans: stands alone, and shows what it is given."""

from __future__ import annotations

import re

from pipeloom import Costs, schedules, simulate
from pipeloom.passes import lower
from pipeloom.report import ShownPlan, plan_html
from tests.pure.test_reports import page_of

SECONDS = {"computing": 3.0, "bubble": 1.0, "tensor": 0.0}


def page(**given) -> str:
    schedule = schedules.build("1f1b", num_ranks=2, num_microbatches=4)
    usual = ShownPlan(name="usual choice", cells=(), seconds={"computing": 3.0, "bubble": 4.0, "tensor": 1.0})
    shown = {
        "title": "a <model> & more",
        "lead": "12 configurations",
        "columns": ["", "pipeline", "step"],
        "peak_bytes": [2.0**30, 2.0**29],
        "memory_bytes": 2.0**31,
        "timeline": simulate(lower(schedule), Costs.uniform(forward=1.0, backward=2.0)),
        "reasons": ["It has the smallest bubble."],
        "refused": {"needs more memory": 1234, "no such degree": 5},
        "others": [usual],
    } | given
    best = ShownPlan(name="plan 1", cells=["1", "2", "4 s"], seconds=SECONDS)
    second = ShownPlan(name="plan 2", cells=["2", "1", "5 s"], seconds=SECONDS | {"bubble": 2.0})
    return plan_html([best, second], **shown)


def test_the_page_stands_alone_and_shows_everything():
    text = page_of(page())
    for words in (
        "a <model> & more",
        "12 configurations",
        "plan 2",
        "usual choice",
        "It has the smallest bubble.",
        "needs more memory 1,234",
        "rank 1 512 MiB",
        "The full width is 2 GiB",
        "1f1b",
    ):
        assert words in text, words


def test_bars_are_stacked_at_one_scale():
    widths = re.findall(r'title="([a-z]+): [^"]+" style="width:([\d.]+)%', page())
    assert widths == [
        ("computing", "37.50"),
        ("bubble", "12.50"),
        ("computing", "37.50"),
        ("bubble", "25.00"),
        ("computing", "37.50"),
        ("bubble", "50.00"),
        ("tensor", "12.50"),
    ]


def test_a_much_longer_bar_does_not_hide_the_others():
    slow = ShownPlan(name="usual choice", cells=(), seconds={"computing": 100.0, "bubble": 300.0, "tensor": 0.0})
    found = page(others=[slow])
    assert "usual choice (not to scale)" in page_of(found)
    widths = re.findall(r'style="width:([\d.]+)%;background', found)
    assert widths == ["18.75", "6.25", "18.75", "12.50", "25.00", "75.00"]


def test_memory_of_many_ranks_is_drawn_in_groups():
    text = page_of(page(peak_bytes=[3.0 * 2**30] * 100 + [2.0**30] * 28, memory_bytes=None))
    assert "ranks 0 to 99 3 GiB ranks 100 to 127 1 GiB" in text
    uneven = page_of(page(peak_bytes=[2.0**30 + 2**20 * rank for rank in range(300)], memory_bytes=None))
    assert "rank 299" in uneven
    assert "rank 236 " in uneven
    assert "rank 235 " not in uneven, "the largest of them"
