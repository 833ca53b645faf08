"""Schedules that cut sequences into slices: their staircases, closed forms, legality and deadlocks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipeloom import cli, schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import Action, Op, check
from pipeloom.passes import lower
from pipeloom.sim import Costs, simulate

SLICED = [name for name, family in schedules.FAMILIES.items() if family.sliced]
SIZES = [(p, m, k) for p in (1, 2, 3, 5, 8) for m in (1, 2, 3, 4, 8) for k in (1, 2, 3, 4, 7)]


def build(name, p, m, k, v=None):
    return schedules.build(name, num_ranks=p, num_microbatches=m, num_slices=k, num_chunks=v)


def test_the_table_marks_them():
    assert SLICED == ["terapipe", "seq1f1b", "seq1f1b-interleaved"]


@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (0.7, 0.4)])
@pytest.mark.parametrize("name", ["terapipe", "seq1f1b"])
def test_makespan_and_peak_of_equal_slices(name, forward, backward):
    costs = Costs.uniform(forward=forward, backward=backward)
    for p, m, k in SIZES:
        schedule = build(name, p, m, k)
        live = check(schedule).live_activations
        assert list(live) == [m * k if name == "terapipe" else min(p - d + k - 1, m * k) for d in range(p)]
        timeline = simulate(schedule, costs)
        assert timeline.makespan == pytest.approx((m * k + p - 1) * (forward + backward) / k)
        assert simulate(lower(schedule), costs).makespan == pytest.approx(timeline.makespan)


def test_makespan_and_peak_of_interleaved_slices():
    costs, legal = Costs.uniform(forward=1.0, backward=1.5), 0
    for p, m, k in SIZES:
        for v in (2, 3):
            if p % k or m * k % p:
                with pytest.raises(ScheduleError, match=r"needs .* slices, and micro-batches x slices"):
                    build("seq1f1b-interleaved", p, m, k, v)
                continue
            legal += 1
            schedule = build("seq1f1b-interleaved", p, m, k, v)
            peaks = [min((v - 1) * p + 2 * (p - 1 - d) + k, m * k * v) for d in range(p)]
            assert list(check(schedule).live_activations) == peaks
            assert simulate(schedule, costs).makespan == pytest.approx((m * k * v + p - 1) * 2.5 / (k * v))
    assert legal > 40


def test_closed_forms_of_the_table_with_slices():
    costs = Costs.uniform(forward=1.0, backward=2.0)
    for name in SLICED:
        family = schedules.FAMILIES[name]
        for p, m, k, v in ((4, 4, 2, 1), (4, 8, 4, 2), (2, 3, 2, 3)):
            if family.chunks is not None:
                v = 1
            schedule = build(name, p, m, k, v)
            names = {"p": p, "m": m, "v": v, "k": k, "min": min}
            timeline = simulate(schedule, costs)
            assert timeline.bubble_fraction == pytest.approx(eval(family.bubble, {}, names))
            said = [eval(family.peak, {}, {**names, "d": d}) for d in range(p)]
            assert list(check(schedule).peak_activations) == pytest.approx(said)


def test_staircase_of_seq1f1b():
    lines = [" ".join(map(str, order)) for order in build("seq1f1b", 2, 2, 2).orders]
    assert lines == [
        "0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0",
    ]


def test_slices_in_a_wrong_order_are_refused():
    schedule = build("terapipe", 1, 1, 3)
    order = list(schedule.orders[0])
    for first, second in ((0, 1), (3, 4)):
        swapped = order.copy()
        swapped[first], swapped[second] = swapped[second], swapped[first]
        with pytest.raises(ScheduleError, match="waits at"):
            check(replace(schedule, orders=(tuple(swapped),)))
    with pytest.raises(ScheduleError, match=r"Use one of the slices 0\.\.2"):
        check(replace(schedule, orders=((*order[:-1], Action(0, Op.B, 0, 3)),)))


def test_schedules_without_slices_say_so(capsys):
    with pytest.raises(ScheduleError, match=r"does not slice sequences\. Use 1 slice, or one of terapipe, seq1f1b"):
        build("1f1b", 2, 2, 2)
    arguments = ["simulate", "seq1f1b", "--ranks", "4", "--microbatches", "1", "--slices", "8", "--json"]
    assert cli.main(arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["slices"] == 8
    assert answer["bubble_fraction"] == pytest.approx(3 / 11)
    assert answer["peak_activations"] == pytest.approx([1.0] * 4)
    assert cli.main([*arguments[:-3], "--slices", "0"]) == 2
    assert "0 slices: must be at least 1" in capsys.readouterr().err
