"""Makespan, span and peak of every schedule against the closed forms of its paper, over ranges of sizes and times."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pipeloom import schedules
from pipeloom.errors import ScheduleError
from pipeloom.ir import check
from pipeloom.passes import lower
from pipeloom.sim import Costs, Network, simulate

RATIOS = ((1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (2.0, 0.75, 0.25), (0.3, 0.4, 0.31))
EQUAL = ((1.0, 1.0, 1.0), (0.7, 0.7, 0.7))
SMALL_W = ((1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 2.0, 1.5), (1.0, 2.0, 0.75), (3.0, 2.0, 2.0))


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a paper says, in p, m, v and the seconds f, i, w of F, I and W of one rank's share."""

    sizes: Callable[[int], Iterator[tuple[int, int]]]  # p -> (m, v) for which it is said
    excess: Callable[..., float]  # makespan beyond m * (f + i + w)
    peak: Callable[..., float]  # on rank d, in rank-shares of one micro-batch
    span_excess: Callable[..., float] | None = None  # that of the span, where it is not the makespan's
    ratios: tuple[tuple[float, float, float], ...] = RATIOS
    at_most: bool = False  # the forms are bounds


def any_m(p: int) -> Iterator[tuple[int, int]]:
    yield from ((m, 1) for m in range(1, 33))


FORMS = {
    "naive": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: m * (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: 1,
    ),
    "gpipe": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: m,
    ),
    "1f1b": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: min(p - d, m),
    ),
    # Of the whole stream; its steady state is in test_streams.py.
    "pipedream": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: min(p - d, m),
    ),
    "pipedream-2bw": Form(
        sizes=lambda p: ((m, 1) for m in range(p, 4 * p + 1, p)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: min(p - d, m),
    ),
    "dapple-pb": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: min(2 * (p - d) - 1, m),
    ),
    "interleaved": Form(
        sizes=lambda p: ((m, v) for v in (1, 2, 3) for m in (range(p, 4 * p + 1, p) if v > 1 else range(1, 9))),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
        peak=lambda p, m, v, d: min((v - 1) * p + 2 * (p - 1 - d) + 1, m * v) / v if v > 1 else min(p - d, m),
    ),
    "bfs": Form(
        sizes=lambda p: ((m, v) for v in (1, 2, 3) for m in range(p, 3 * p + 1)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
        peak=lambda p, m, v, d: m,
    ),
    "zb-h1": Form(
        sizes=lambda p: ((m, 1) for m in range(p, 25)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i - w),
        peak=lambda p, m, v, d: p,
        ratios=SMALL_W,
    ),
    "zb-h2": Form(
        sizes=lambda p: ((m, 1) for m in range(2 * p - 1, 25)),
        excess=lambda p, m, v, f, i, w: (p - 1) * max(f, f + i - 2 * w),
        span_excess=lambda p, m, v, f, i, w: (p - 1) * (f + i - 2 * w),
        peak=lambda p, m, v, d: 2 * p - 1,
        ratios=SMALL_W,
    ),
    "zb-auto": Form(
        sizes=lambda p: ((m, 1) for m in range(2 * p - 1, 25, 3)),
        excess=lambda p, m, v, f, i, w: (p - 1) * f,
        peak=lambda p, m, v, d: m,
        ratios=EQUAL,
        at_most=True,
    ),
    "zb-v": Form(
        sizes=lambda p: ((m, 2) for m in range(2 * p - 1, 25)),
        excess=lambda p, m, v, f, i, w: (p - 1) * f / 2,
        span_excess=lambda p, m, v, f, i, w: 0.0,
        peak=lambda p, m, v, d: p,
        ratios=EQUAL,
    ),
    "v-half": Form(
        sizes=lambda p: ((m, 2) for m in range(2 * p, 2 * p + 5)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / 2,
        peak=lambda p, m, v, d: (p + 2) // 2,
        ratios=EQUAL,
        at_most=True,
    ),
    "v-min": Form(
        sizes=lambda p: ((m, 2) for m in range(2 * p, 2 * p + 5)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) * 2 / 3,
        peak=lambda p, m, v, d: (p + 4) // 3,
        ratios=EQUAL,
        at_most=True,
    ),
    "dualpipe": Form(
        sizes=lambda p: ((m, 2) for m in (range(2 * p, 3 * p + 5, 2) if p % 2 == 0 else ())),
        excess=lambda p, m, v, f, i, w: (p / 2 - 1) * (f + i + w + i + w - 3 * w),
        peak=lambda p, m, v, d: p + 1,
        ratios=((1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 2.0, 1.5)),
    ),
    "dualpipev": Form(
        sizes=lambda p: ((m, 2) for m in range(2 * p, 3 * p + 4)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w + i + w - 3 * w) / 2,
        peak=lambda p, m, v, d: p + 1 / 2,
        ratios=((1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (2.0, 2.0, 1.5)),
    ),
    "chimera": Form(
        sizes=lambda p: ((m, 2) for m in (() if p % 2 else (p,))),
        excess=lambda p, m, v, f, i, w: (p - 2) * (i + w),
        peak=lambda p, m, v, d: p / 2 + 1 + min(d, p - 1 - d),
        ratios=((1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (2.0, 1.5, 0.5)),
    ),
    "hanayo": Form(
        sizes=lambda p: ((p, v) for v in (2, 4, 6)),
        excess=lambda p, m, v, f, i, w: m * (f + i + w) * (2 * p - 2) / (3 * p * v / 2 - p + 1),
        peak=lambda p, m, v, d: p,
        ratios=EQUAL,
        at_most=True,
    ),
    # With slices: test_slices.py.
    "terapipe": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: m,
    ),
    "seq1f1b": Form(
        sizes=any_m,
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
        peak=lambda p, m, v, d: min(p - d, m),
    ),
    "seq1f1b-interleaved": Form(
        sizes=lambda p: ((m, v) for v in (1, 2, 3) for m in range(p, 4 * p + 1, p)),
        excess=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / v,
        peak=lambda p, m, v, d: min((v - 1) * p + 2 * (p - 1 - d) + 1, m * v) / v if v > 1 else min(p - d, m),
    ),
    "search": Form(
        sizes=lambda p: ((m, 1) for m in (2 * p - 1, 2 * p + 3)),
        excess=lambda p, m, v, f, i, w: (p - 1) * f,
        peak=lambda p, m, v, d: m,
        ratios=EQUAL,
        at_most=True,
    ),
}
V_KINDS = ("zb-v", "v-half", "v-min")


def _thinned(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For every number of chunks the first six numbers of micro-batches, every tenth then, and the last."""
    found = []
    for chunks in sorted({v for _, v in sizes}):
        of_chunks = [size for size in sizes if size[1] == chunks]
        found += dict.fromkeys([*of_chunks[:6], *of_chunks[10::10], of_chunks[-1]])
    return found


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.whole_grid)])
@pytest.mark.parametrize(("name", "p"), [(name, p) for name in FORMS for p in range(1, 13 if name in V_KINDS else 9)])
def test_makespan_span_and_peak_are_those_of_the_paper(name, p, whole):
    form = FORMS[name]
    sizes = list(form.sizes(p))
    for m, v in sizes if whole else _thinned(sizes):
        schedule = schedules.build(name, num_ranks=p, num_microbatches=m, num_chunks=v)
        peaks = check(schedule).peak_activations
        said = [form.peak(p, m, v, d) for d in range(p)]
        assert (max(peaks) <= max(said)) if form.at_most else (peaks == pytest.approx(said)), (p, m, v)
        for times in form.ratios if m % 5 == 1 else form.ratios[:1]:
            forward, backward_input, backward_weight = times
            costs = Costs.uniform(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
            timeline = simulate(schedule, costs)
            ideal = m * sum(times)
            assert timeline.ideal_seconds == pytest.approx(ideal, rel=1e-12)
            excess = form.excess(p, m, v, *times)
            assert timeline.peak_activations == pytest.approx(peaks)
            if form.at_most:
                assert timeline.makespan - ideal <= excess + 1e-9, (p, m, v, times)
                continue
            assert timeline.makespan - ideal == pytest.approx(excess, rel=1e-9, abs=1e-9), (p, m, v, times)
            assert timeline.bubble_fraction == pytest.approx(excess / (ideal + excess), abs=1e-9)
            if form.span_excess is not None:
                excess = form.span_excess(p, m, v, *times)
            elif name.startswith("zb"):
                assert timeline.span_seconds - ideal == pytest.approx(excess, rel=1e-9, abs=1e-9), (p, m, v, times)


@pytest.mark.parametrize("name", FORMS)
def test_the_closed_forms_in_the_table_are_those_that_are_tested(name):
    family, form = schedules.FAMILIES[name], FORMS[name]
    sizes = [(p, m, v) for p in (1, 4, 6) for m, v in form.sizes(p)]
    for p, m, v in sizes:
        names = {"p": p, "m": m, "v": v, "k": 1, "min": min, "max": max}
        assert family.bubble.startswith("<=") == form.at_most
        excess = form.excess(p, m, v, 1.0, 1.0, 1.0)
        assert eval(family.bubble.removeprefix("<= "), {}, names) == pytest.approx(excess / (3 * m + excess))
        for d in range(p):
            assert eval(family.peak.removeprefix("<= "), {}, {**names, "d": d}) == pytest.approx(form.peak(p, m, v, d))


def test_every_schedule_has_a_closed_form_that_is_tested():
    assert set(FORMS) == set(schedules.FAMILIES)


def test_1f1b_with_latency_takes_what_theory_says():
    for p in range(2, 9):
        for m in (*range(1, 11), 16, 17, 18, 32):
            for forward, backward, latency in ((1.0, 2.0, 0.25), (1.0, 1.0, 1.0), (0.4, 1.1, 0.7), (2.0, 1.0, 1.5)):
                schedule = schedules.one_f_one_b(num_ranks=p, num_microbatches=m)
                timeline = simulate(
                    schedule, Costs.uniform(forward=forward, backward=backward), Network(latency_seconds=latency)
                )
                crossings = p - 1 if m == 1 else m + p - 3 - (m - 2) // p
                expected = (m + p - 1) * (forward + backward) + 2 * latency * crossings
                assert timeline.makespan == pytest.approx(expected, rel=1e-9), (p, m, forward, backward, latency)


def test_1f1b_on_equally_many_ranks_per_stage_is_that_of_one_replica():
    costs = Costs.uniform(forward=1.0, backward=2.0)
    for p in range(1, 6):
        for replicas in (2, 3):
            for m in range(1, 9):
                one = simulate(schedules.one_f_one_b(num_ranks=p, num_microbatches=m), costs)
                all_of_them = schedules.one_f_one_b(
                    num_ranks=p * replicas, num_microbatches=m * replicas, replicas=[replicas] * p
                )
                found = simulate(all_of_them, costs)
                assert found.makespan == pytest.approx(one.makespan)
                assert found.peak_activations == tuple(peak for peak in one.peak_activations for _ in range(replicas))


def test_1f1b_with_one_rank_lost_is_no_slower_than_one_replica():
    for p in range(2, 6):
        for stage in range(p):
            replicas = [1 if each == stage else 2 for each in range(p)]
            for m in range(1, 9):
                schedule = schedules.one_f_one_b(num_ranks=2 * p - 1, num_microbatches=2 * m, replicas=replicas)
                check(schedule)
                found, lost = simulate(schedule, Costs.uniform(forward=1.0, backward=2.0)), sum(replicas[:stage])
                assert found.busy_seconds[lost] == pytest.approx(3.0 * 2 * m)
                assert found.makespan <= 3.0 * (2 * m + p - 1) + 1e-9  # that of one replica with all micro-batches
                assert found.peak_activations[lost] <= min(2 * (p - stage) - 1, 2 * m)


@pytest.mark.parametrize("name", ["gpipe", "dapple-pb"])
def test_deep_warm_ups_hide_all_latency_but_one_way_down_and_up(name):
    for p in range(1, 7):
        for m in range(1, 14):
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
            for latency in (0.5, 1.5):  # up to half of F and B together
                timeline = simulate(schedule, Costs.uniform(), Network(latency_seconds=latency))
                assert timeline.makespan == pytest.approx((m + p - 1) * 3.0 + 2 * latency * (p - 1), rel=1e-12)


def test_interleaved_takes_every_legal_group_size_and_refuses_every_other():
    """Megatron's rule, p <= N <= m and a last group of none or of at least p, is exactly where the forms hold."""
    legal = illegal = 0
    for p in range(2, 7):
        for m in range(1, 3 * p + 1):
            for n in range(1, m + 2):
                for v in (2, 3):
                    sizes = {"num_ranks": p, "num_microbatches": m, "num_chunks": v, "group_size": n}
                    if p <= n <= m and (m % n == 0 or m % n >= p):
                        legal += 1
                        schedule = schedules.interleaved(**sizes)
                        timeline = simulate(schedule, Costs.uniform(forward=1.0, backward=2.0))
                        assert timeline.makespan == pytest.approx((m * v + p - 1) * 3.0 / v), sizes
                        peaks = tuple(min((v - 1) * n + 2 * (p - 1 - d) + 1, m * v) for d in range(p))
                        assert check(schedule).live_activations == peaks
                    else:
                        illegal += 1
                        with pytest.raises(ScheduleError, match="groups of"):
                            schedules.interleaved(**sizes)
    assert legal > 190
    assert illegal > 790


def test_what_interleaved_refuses_would_deadlock_or_be_slower(monkeypatch):
    module = sys.modules["pipeloom.schedules.interleaved"]
    monkeypatch.setattr(module, "_check_groups", lambda p, m, n: None)
    for p in range(2, 6):
        for m in range(1, 2 * p + 2):
            for n in range(1, m + 1):
                if n < p or 0 < m % n < p:
                    schedule = module.interleaved(num_ranks=p, num_microbatches=m, num_chunks=2, group_size=n)
                    try:
                        makespan = simulate(schedule, Costs.uniform(forward=1.0, backward=2.0)).makespan
                    except ScheduleError:
                        continue
                    assert makespan > (m * 2 + p - 1) * 3.0 / 2 + 1e-9, (p, m, n)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipev"])
def test_overlapped_pairs_save_what_dualpipe_says(name):
    """No rank idles longer than (stages/2 - 1) * (t_FB + tB - 3 tW), and the rank that idles most idles just that."""
    for p in (2, 4, 6):
        for m in (2 * p, 3 * p):
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
            share = 1 if name == "dualpipe" else 0.5
            assert len(schedule.overlapped) > 0
            for forward, weight, overlap in ((1.0, 1.0, 0.8), (2.0, 1.0, 0.9), (1.0, 0.5, 0.75)):
                costs = Costs(forward=forward, backward_input=forward, backward_weight=weight, overlap=overlap)
                timeline = simulate(schedule, costs)
                backward = forward + weight
                unit = overlap * (forward + backward)
                claim = (schedule.num_stages / 2 - 1) * (unit + backward - 3 * weight) * share
                idle = max(timeline.makespan - busy for busy in timeline.busy_seconds)
                assert idle == pytest.approx(claim), (p, m, forward, weight, overlap)
                lowered = lower(schedule)
                assert check(lowered).live_activations == check(schedule).live_activations
                assert simulate(lowered, costs).compute_spans == timeline.compute_spans


def test_chimera_keeps_its_bubble_in_longer_steps():
    for p in (2, 4, 6, 8):
        for m in range(p, 3 * p + 3, 2):
            schedule = schedules.chimera(num_ranks=p, num_microbatches=m)
            assert max(check(schedule).peak_activations) == p
            for backward in (1.0, 2.0):
                timeline = simulate(schedule, Costs.uniform(forward=1.0, backward=backward))
                assert timeline.makespan == pytest.approx(m * (1 + backward) + (p - 2) * backward)


def test_hanayo_stays_near_its_paper_and_gains_from_waves():
    for p, one_wave in ((2, 1 / 4), (4, 1 / 3), (8, 7 / 19)):
        bubbles = []
        for waves in (1, 2, 3):
            schedule = schedules.hanayo(num_ranks=p, num_microbatches=p, num_chunks=2 * waves)
            bubbles.append(simulate(schedule, Costs.uniform(forward=1.0, backward=2.0)).bubble_fraction)
            if waves > 1:
                assert bubbles[-1] == pytest.approx((2 * p - 2) / (3 * p * waves + p - 1), rel=0.08)
        assert bubbles[0] == pytest.approx(one_wave)
        assert bubbles == sorted(bubbles, reverse=True)
        for m in (2 * p, 4 * p):
            schedule = schedules.hanayo(num_ranks=p, num_microbatches=m)
            assert max(check(schedule).peak_activations) <= p
            assert simulate(schedule, Costs.uniform()).bubble_fraction < one_wave


@pytest.mark.parametrize("p", range(1, 13))
def test_v_half_and_v_min_hold_just_what_their_paper_says(p):
    for name, peak in (("v-half", (p + 2) // 2), ("v-min", (p + 4) // 3)):
        for m in (p + 3, 2 * p + 3):
            schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
            assert max(check(schedule).live_activations) == 2 * peak
        for m in range(p, p + 3) if name == "v-half" else range(1, p):  # the bubble is there in short steps already
            timeline = simulate(schedules.build(name, num_ranks=p, num_microbatches=m), Costs.uniform())
            assert timeline.makespan - 3 * m <= FORMS[name].excess(p, m, 2, 1.0, 1.0, 1.0) + 1e-9


def test_smaller_steps_than_the_closed_forms_ask_for_are_legal():
    for name in ("bfs", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "hanayo"):
        for p in range(2, 6):
            for m in range(1, 2 * p):
                schedule = schedules.build(name, num_ranks=p, num_microbatches=m)
                assert max(check(schedule).peak_activations) <= m


def test_breadth_first_is_slower_below_one_micro_batch_a_rank():
    schedule = schedules.breadth_first(num_ranks=4, num_microbatches=2, num_chunks=2)
    assert simulate(schedule, Costs.uniform(forward=2.0, backward=4.0)).makespan == 27.0
