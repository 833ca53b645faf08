"""Each schedule against its staircase, and against the closed forms of its paper."""

from __future__ import annotations

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import check
from pipeloom.ir.text import format_orders
from pipeloom.sim import Costs, Network, simulate

# Rows are ranks, columns moments of equal length: the order of every rank and who waits for whom.
STAIRCASES = {
    "naive": """
        0F0 ... ... ... ... 0B0 0F1 ... ... ... ... 0B1
        ... 1F0 ... ... 1B0 ... ... 1F1 ... ... 1B1 ...
        ... ... 2F0 2B0 ... ... ... ... 2F1 2B1 ... ...
    """,
    "gpipe": """
        0F0 0F1 0F2 0F3 ... ... ... ... 0B0 0B1 0B2 0B3
        ... 1F0 1F1 1F2 1F3 ... ... 1B0 1B1 1B2 1B3 ...
        ... ... 2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3 ... ...
    """,
    "1f1b": """
        0F0 0F1 0F2 ... ... 0B0 0F3 0B1 0F4 0B2 ... 0B3 ... 0B4
        ... 1F0 1F1 ... 1B0 1F2 1B1 1F3 1B2 1F4 1B3 ... 1B4 ...
        ... ... 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 ... ...
    """,
}


def staircase(name: str, *, num_ranks: int, num_microbatches: int) -> str:
    """The simulated schedule drawn as above: every action takes one column."""
    schedule = schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    timeline = simulate(schedule, Costs.uniform(forward=1.0, backward=1.0))
    rows = []
    for row in timeline.spans:
        at = {round(span.start): str(span.action) for span in row}
        rows.append(" ".join(at.get(column, "...") for column in range(round(timeline.makespan))))
    return "\n".join(rows)


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_every_schedule_has_its_staircase(name):
    expected = [line.strip() for line in STAIRCASES[name].strip().splitlines()]
    num_microbatches = 1 + max(int(cell[2:]) for cell in expected[0].split() if cell != "...")
    drawn = staircase(name, num_ranks=len(expected), num_microbatches=num_microbatches)
    assert drawn.splitlines() == expected


def test_1f1b_with_fewer_micro_batches_than_ranks():
    assert staircase("1f1b", num_ranks=4, num_microbatches=2).splitlines() == [
        "0F0 0F1 ... ... ... ... ... 0B0 ... 0B1",
        "... 1F0 1F1 ... ... ... 1B0 ... 1B1 ...",
        "... ... 2F0 2F1 ... 2B0 ... 2B1 ... ...",
        "... ... ... 3F0 3B0 3F1 3B1 ... ... ...",
    ]


def test_the_order_of_1f1b_is_megatrons():
    assert format_orders(schedules.one_f_one_b(num_ranks=2, num_microbatches=3).orders) == (
        "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    )


BUBBLES = {
    "naive": lambda p, m: (p - 1) / p,
    "gpipe": lambda p, m: (p - 1) / (m + p - 1),
    "1f1b": lambda p, m: (p - 1) / (m + p - 1),
}
PEAKS = {
    "naive": lambda p, m, d: 1,
    "gpipe": lambda p, m, d: m,
    "1f1b": lambda p, m, d: min(p - d, m),
}
RATIOS = ((1.0, 2.0), (1.0, 1.0), (2.0, 1.0), (0.3, 0.71))


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_bubble_and_peak_equal_the_closed_forms(name):
    for p in range(1, 9):
        for m in range(1, 33):
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
            peaks = tuple(PEAKS[name](p, m, d) for d in range(p))
            assert check(schedule).peak_activations == check(schedule).live_activations == peaks
            for forward, backward in RATIOS if m % 5 == 1 else RATIOS[:1]:
                timeline = simulate(schedule, Costs.uniform(forward=forward, backward=backward))
                ideal = m * (forward + backward)
                assert timeline.ideal_seconds == pytest.approx(ideal, rel=1e-12)
                assert timeline.makespan == pytest.approx(ideal / (1 - BUBBLES[name](p, m)), rel=1e-9)
                assert timeline.bubble_fraction == pytest.approx(BUBBLES[name](p, m), rel=1e-9, abs=1e-12)
                assert timeline.peak_activations == peaks


@pytest.mark.parametrize("name", schedules.FAMILIES)
def test_the_closed_forms_in_the_table_are_those_that_are_tested(name):
    family = schedules.FAMILIES[name]
    for p, m in ((1, 1), (4, 8), (5, 3)):
        names = {"p": p, "m": m, "v": 1, "min": min, "max": max}
        assert eval(family.bubble, {}, names) == pytest.approx(BUBBLES[name](p, m))
        for d in range(p):
            assert eval(family.peak, {}, {**names, "d": d}) == PEAKS[name](p, m, d)


def test_1f1b_with_latency_takes_what_theory_says():
    for p in range(2, 9):
        for m in range(1, 33):
            for forward, backward, latency in ((1.0, 2.0, 0.25), (1.0, 1.0, 1.0), (0.4, 1.1, 0.7), (2.0, 1.0, 1.5)):
                schedule = schedules.one_f_one_b(num_ranks=p, num_microbatches=m)
                timeline = simulate(
                    schedule, Costs.uniform(forward=forward, backward=backward), Network(latency_seconds=latency)
                )
                crossings = p - 1 if m == 1 else m + p - 3 - (m - 2) // p
                expected = (m + p - 1) * (forward + backward) + 2 * latency * crossings
                assert timeline.makespan == pytest.approx(expected, rel=1e-9), (p, m, forward, backward, latency)


def test_gpipe_hides_all_latency_but_one_way_down_and_up():
    for p in range(1, 7):
        for m in range(1, 9):
            schedule = schedules.gpipe(num_ranks=p, num_microbatches=m)
            timeline = simulate(schedule, Costs.uniform(), Network(latency_seconds=0.5))
            assert timeline.makespan == pytest.approx((m + p - 1) * 3.0 + 2 * 0.5 * (p - 1), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("1f1", {}, "unknown.*did you mean '1f1b'"),
        ("xyzzy", {}, "unknown.*pipeloom schedules"),
        ("1f1b", {"num_ranks": 0}, "0 ranks.*at least 1"),
        ("1f1b", {"num_microbatches": -3}, "-3 micro-batches.*at least 1"),
        ("gpipe", {"num_chunks": 2}, "holds one stage a rank"),
        ("gpipe", {"num_chunks": 0}, "0 chunks.*at least 1"),
    ],
)
def test_impossible_schedules_are_refused_in_one_line(name, sizes, message):
    with pytest.raises(ScheduleError, match=message) as caught:
        schedules.build(name, **{"num_ranks": 2, "num_microbatches": 4, **sizes})
    assert "\n" not in str(caught.value)
